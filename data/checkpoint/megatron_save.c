/* megatron_save.c: the files of a folder torch_dist that hold no values. The forms are those of torch's
 * distributed.checkpoint and of Megatron-Core 0.19. */
#include "megatron_save.h"

#include "../base/file.h"
#include "../options/option_table.h"
#include "megatron_written.h"

#include <stdlib.h>
#include <string.h>

#define MT_TORCH_METADATA "torch.distributed.checkpoint.metadata\n"

/* ---- .metadata */

/* Begins an object whose state is a dict; mt_object_end ends it. */
static void mt_object_begin(mt_pickler *p, const char *class) {
    mt_pickle_global(p, class);
    mt_bytes_add(&p->out, ")\x81}(", 4); // EMPTY_TUPLE, NEWOBJ, EMPTY_DICT, MARK
}

static void mt_object_end(mt_pickler *p) {
    mt_bytes_add(&p->out, "ub", 2); // SETITEMS, BUILD
}

/* Begins a dict, or a list; the ends close it. */
static void mt_dict_begin(mt_pickler *p) {
    mt_bytes_add(&p->out, "}(", 2);
}

static void mt_dict_end(mt_pickler *p) {
    mt_pickle_op(p, 'u');
}

static void mt_list_begin(mt_pickler *p) {
    mt_bytes_add(&p->out, "](", 2);
}

static void mt_list_end(mt_pickler *p) {
    mt_pickle_op(p, 'e');
}

/* The type and, as torch keeps them for older versions, layout, requires_grad, memory format and pinned memory. */
static void mt_dist_properties(mt_pickler *p, mt_dtype dtype) {
    mt_pickle_global(p, MT_TORCH_METADATA "TensorProperties");
    mt_bytes_add(&p->out, ")\x81(", 3);
    mt_pickle_global(p, mt_torch_dtype(dtype));
    mt_pickle_global(p, "torch.serialization\n_get_layout");
    mt_pickle_text(p, "torch.strided");
    mt_bytes_add(&p->out, "\x85R", 2); // TUPLE1, REDUCE
    mt_pickle_bool(p, false);
    mt_pickle_global(p, MT_TORCH_METADATA "_MEM_FORMAT_ENCODING");
    mt_pickle_int(p, 0);
    mt_bytes_add(&p->out, "\x85R", 2);
    mt_pickle_bool(p, false);
    mt_bytes_add(&p->out, "tb", 2); // TUPLE, BUILD
}

/* The `number`-th name that a tensor is listed under; false: it has no more. */
static bool mt_dist_name(const mt_saved_tensor *tensor, const mt_saved_set *set, bool states, int number,
                         char name[192]) {
    static const char plain[] = "optimizer.state.fp32_param.", distributed[] = "optimizer.state.param.";
    const char *own = tensor->chunk.name;
    bool is_master = strncmp(own, plain, strlen(plain)) == 0;
    bool serves = states && !set->has_masters && tensor->state == MT_STATE_WEIGHTS && tensor->trained;
    if (number == 0) snprintf(name, 192, "%s", own);
    if (number == 1) snprintf(name, 192, "%s%s", distributed, is_master ? own + strlen(plain) : own);
    return number == 0 || (number == 1 && (is_master || serves));
}

/* Tensors [first, the result) are the parts of one. */
static int64_t mt_dist_parts_end(const mt_saved_set *set, int64_t first) {
    int64_t end = first + 1;
    while (end < set->count && strcmp(set->tensors[end].chunk.name, set->tensors[first].chunk.name) == 0) end++;
    return end;
}

static void mt_dist_write_tensors(mt_pickler *p, const mt_saved_set *set, bool states) {
    char name[192];
    for (int64_t first = 0, end; first < set->count; first = end) {
        const mt_core_chunk *whole = &set->tensors[first].chunk;
        end = mt_dist_parts_end(set, first);
        for (int i = 0; mt_dist_name(&set->tensors[first], set, states, i, name); i++) {
            mt_pickle_text(p, name);
            mt_object_begin(p, MT_TORCH_METADATA "TensorStorageMetadata");
            mt_pickle_text(p, "properties");
            mt_dist_properties(p, set->tensors[first].dtype);
            mt_pickle_text(p, "size");
            mt_pickle_size(p, whole->shape, whole->num_dims);
            mt_pickle_text(p, "chunks");
            mt_list_begin(p);
            for (int64_t k = first; k < end; k++) {
                const mt_core_chunk *part = &set->tensors[k].chunk;
                mt_object_begin(p, MT_TORCH_METADATA "ChunkStorageMetadata");
                mt_pickle_text(p, "offsets");
                mt_pickle_size(p, part->first, part->num_dims);
                mt_pickle_text(p, "sizes");
                mt_pickle_size(p, part->sizes, part->num_dims);
                mt_object_end(p);
            }
            mt_list_end(p);
            mt_object_end(p);
        }
    }
}

/* One entry of storage_data; `first`: the part's place in its tensor, NULL: an object. */
static void mt_dist_write_place(mt_pickler *p, const char *name, const mt_core_chunk *part, const char *file,
                                int64_t offset, int64_t bytes) {
    mt_object_begin(p, MT_TORCH_METADATA "MetadataIndex");
    mt_pickle_text(p, "fqn");
    mt_pickle_text(p, name);
    mt_pickle_text(p, "offset");
    if (part)
        mt_pickle_size(p, part->first, part->num_dims);
    else
        mt_pickle_none(p);
    mt_pickle_text(p, "index");
    mt_pickle_none(p);
    mt_object_end(p);
    mt_object_begin(p, "torch.distributed.checkpoint.filesystem\n_StorageInfo");
    mt_pickle_text(p, "relative_path");
    mt_pickle_text(p, file);
    mt_pickle_text(p, "offset");
    mt_pickle_int(p, offset);
    mt_pickle_text(p, "length");
    mt_pickle_int(p, bytes);
    mt_pickle_text(p, "transform_descriptors");
    mt_pickle_none(p);
    mt_object_end(p);
}

static void mt_dist_write_places(mt_pickler *p, const mt_saved_set *set, bool states) {
    char name[192];
    for (const mt_saved_tensor *t = set->tensors; t < set->tensors + set->count; t++) {
        mt_archive archive;
        mt_saved_archive(t, &archive);
        int64_t before = archive.head.count, bytes = before + t->bytes + archive.tail.count;
        mt_archive_free(&archive);
        for (int i = 0; mt_dist_name(t, set, states, i, name); i++)
            mt_dist_write_place(p, name, &t->chunk, set->files[t->file].name, t->offset - before, bytes);
    }
}

/* ---- further state of modules */

static int mt_text_compare(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* The name of a module's further state, "MODULE._extra_state/shard_FIRST_SHAPE", where FIRST and SHAPE are the layer's
 * and the expert's; to free. */
static char *mt_dist_object_name(const char *module, int64_t length, const mt_core_chunk *part) {
    char *name = mt_malloc(length + 160);
    int64_t lead = part->num_lead;
    int64_t used = sprintf(name, "%.*s._extra_state/shard_", (int)length, module);
    for (int64_t i = 0; i < lead; i++) used += sprintf(name + used, "%s%lld", i ? "." : "", (long long)part->first[i]);
    used += sprintf(name + used, "%s", lead ? "_" : "0_1");
    for (int64_t i = 0; i < lead; i++) used += sprintf(name + used, "%s%lld", i ? "." : "", (long long)part->shape[i]);
    return name;
}

/* The names of all modules that may have further state, sorted, each once; the output layer of hybrid models, which
 * have a final norm of their own name. Free the names and the list. */
static char **mt_dist_objects(const mt_saved_set *set, int64_t *count) {
    char **names = mt_malloc((2 * set->count + 1) * (int64_t)sizeof *names);
    int64_t n = 0;
    for (const mt_saved_tensor *t = set->tensors; t < set->tensors + set->count; t++) {
        const char *name = t->chunk.name, *last = strrchr(name, '.');
        static const char attention[] = ".linear_proj.weight", core[] = ".core_attention";
        bool in_block = strncmp(name, "decoder.", 8) == 0 || strncmp(name, "mtp.", 4) == 0;
        bool is_part = strstr(name, ".weight.") || strstr(name, ".conv1d.") || strcmp(last, ".A_log") == 0 ||
                       strcmp(last, ".dt_bias") == 0 || strcmp(last, ".D") == 0;
        if (strcmp(name, "decoder.final_norm.weight") == 0)
            names[n++] = mt_dist_object_name("output_layer", (int64_t)strlen("output_layer"), &t->chunk);
        if (!in_block || is_part || strstr(name, ".router.") || strstr(name, ".gate_weight")) continue;
        names[n++] = mt_dist_object_name(name, last - name, &t->chunk);
        if (!mt_text_ends_with(name, attention)) continue;
        char module[192];
        int64_t length = snprintf(module, sizeof module, "%.*s%s", (int)(strlen(name) - strlen(attention)), name, core);
        names[n++] = mt_dist_object_name(module, length, &t->chunk);
    }
    if (n > 0) qsort(names, (size_t)n, sizeof *names, mt_text_compare);
    *count = 0;
    for (int64_t i = 0; i < n; i++)
        if (*count > 0 && strcmp(names[*count - 1], names[i]) == 0)
            free(names[i]);
        else
            names[(*count)++] = names[i];
    return names;
}

void mt_dist_objects_make(mt_bytes *file) {
    mt_pickler p;
    mt_archive archive;
    mt_pickler_begin(&p);
    mt_bytes_add(&p.out, "]Na", 3); // EMPTY_LIST, NONE, APPEND
    mt_pickler_end(&p);
    mt_archive_make(&archive, &p.out, -1, 0);
    free(p.out.data);
    *file = archive.head;
}

void mt_dist_metadata_make(const mt_saved_set *set, bool states, mt_bytes *file) {
    mt_pickler p;
    mt_bytes object;
    int64_t count;
    char **objects = mt_dist_objects(set, &count);
    mt_dist_objects_make(&object);
    mt_pickler_begin(&p);
    mt_object_begin(&p, MT_TORCH_METADATA "Metadata");
    mt_pickle_text(&p, "state_dict_metadata");
    mt_dict_begin(&p);
    mt_dist_write_tensors(&p, set, states);
    for (int64_t i = 0; i < count; i++) {
        mt_pickle_text(&p, objects[i]);
        mt_pickle_global(&p, MT_TORCH_METADATA "BytesStorageMetadata");
        mt_bytes_add(&p.out, ")\x81", 2);
    }
    mt_dict_end(&p);
    mt_pickle_text(&p, "planner_data");
    mt_pickle_none(&p);
    mt_pickle_text(&p, "storage_data");
    mt_dict_begin(&p);
    mt_dist_write_places(&p, set, states);
    for (int64_t i = 0; i < count; i++) {
        mt_dist_write_place(&p, objects[i], NULL, MT_DIST_OBJECTS, 0, object.count);
        free(objects[i]);
    }
    mt_dict_end(&p);
    mt_pickle_text(&p, "storage_meta");
    mt_pickle_none(&p);
    mt_pickle_text(&p, "version");
    mt_pickle_text(&p, "1.0.0");
    mt_object_end(&p);
    mt_pickler_end(&p);
    free(objects), free(object.data);
    *file = p.out;
}

/* ---- common.pt */

static void mt_item_int(mt_pickler *p, const char *key, int64_t value) {
    mt_pickle_text(p, key);
    mt_pickle_int(p, value);
}

static void mt_item_real(mt_pickler *p, const char *key, double value) {
    mt_pickle_text(p, key);
    mt_pickle_real(p, value);
}

static void mt_item_bool(mt_pickler *p, const char *key, bool value) {
    mt_pickle_text(p, key);
    mt_pickle_bool(p, value);
}

static void mt_item_text(mt_pickler *p, const char *key, const char *value) {
    mt_pickle_text(p, key);
    mt_pickle_text(p, value);
}

static void mt_item_none(mt_pickler *p, const char *key) {
    mt_pickle_text(p, key);
    mt_pickle_none(p);
}

/* An option's value. */
static void mt_arg_write(mt_pickler *p, const mt_run_options *o, const mt_option *row, mt_arg_when when) {
    bool is_number = row->type == MT_INT, is_none = when == MT_ARG_UNLESS_0 && is_number && *mt_option_int(o, row) == 0;
    char *text = mt_option_text(o, row);
    if (is_none)
        mt_pickle_none(p);
    else if (is_number)
        mt_pickle_int(p, *mt_option_int(o, row));
    else if (row->type == MT_REAL)
        mt_pickle_real(p, *mt_option_real(o, row));
    else if (row->type == MT_FLAG || row->type == MT_NO)
        mt_pickle_bool(p, *mt_option_bool(o, row));
    else
        mt_pickle_text(p, text);
    free(text);
}

/* --moe-layer-freq: a number, or a list of a 0 or 1 for each layer. */
static void mt_arg_write_freq(mt_pickler *p, const mt_run_options *o) {
    const char *freq = o->moe_layer_freq ? o->moe_layer_freq : "1";
    int64_t number;
    mt_pickle_text(p, "moe_layer_freq");
    if (mt_parse_int(freq, &number)) {
        mt_pickle_int(p, number);
        return;
    }
    mt_list_begin(p);
    for (int64_t i = 0; i < o->stack.num_layers; i++) mt_pickle_int(p, mt_layer_has_experts(&o->stack, i));
    mt_list_end(p);
}

/* --linear-attention-freq, as a list of a 0 or 1 for each layer. */
static void mt_arg_write_linear_layers(mt_pickler *p, const mt_options *o) {
    mt_pickle_text(p, "linear_attention_freq");
    mt_list_begin(p);
    for (int64_t i = 0; i < o->num_layers; i++) mt_pickle_int(p, mt_layer_listed(o->linear_layers, i));
    mt_list_end(p);
}

/* The pattern of a hybrid model, and a / and the layers of each module of multi-token prediction. */
static void mt_arg_write_pattern(mt_pickler *p, const mt_options *o) {
    mt_bytes text = {0};
    mt_bytes_add(&text, o->hybrid_layers, (int64_t)strlen(o->hybrid_layers));
    for (int64_t i = 0; i < o->mtp_num_layers; i++) {
        mt_bytes_add(&text, "/", 1);
        mt_bytes_add(&text, o->mtp_hybrid_layers, (int64_t)strlen(o->mtp_hybrid_layers));
    }
    mt_bytes_add(&text, "", 1);
    mt_item_text(p, "hybrid_layer_pattern", text.data);
    free(text.data);
}

/* mscale of Megatron-Core, from the factor of cos and sin: g(mscale) / g(mscale_all_dim). */
static double mt_yarn_mscale_of(const mt_options *o) {
    double scaled = o->yarn_attention_factor * mt_yarn_mscale(o->rope_scaling_factor, o->yarn_mscale_all_dim);
    return o->rope_scaling_factor > 1 ? (scaled - 1) / (mt_yarn_mscale(o->rope_scaling_factor, 1) - 1) : 1;
}

/* The run's arguments, as --use-checkpoint-args of Megatron-LM reads them. */
static void mt_dist_write_args(mt_pickler *p, const mt_run_options *o, const mt_grid *grid, const mt_run_state *state,
                               bool states, mt_dtype dtype) {
    const mt_options *s = &o->stack;
    bool experts = mt_has_experts(s);
    mt_object_begin(p, "argparse\nNamespace");
    for (const mt_written_arg *arg = mt_written_args; arg->key; arg++) {
        mt_arg_when when = arg->when;
        if ((when == MT_ARG_EXPERTS && !experts) || (when == MT_ARG_LATENT && !mt_is_latent(s))) continue;
        if ((when == MT_ARG_LINEAR && !s->linear_layers) || (when == MT_ARG_HYBRID && !s->hybrid_layers)) continue;
        mt_pickle_text(p, arg->key);
        mt_arg_write(p, o, mt_option_of(arg->offset), when);
    }
    if (experts && !s->hybrid_layers) mt_arg_write_freq(p, o);
    if (s->hybrid_layers) mt_arg_write_pattern(p, s);
    if (s->linear_layers) mt_arg_write_linear_layers(p, s);
    mt_item_bool(p, "group_query_attention", s->num_query_groups != s->num_attention_heads);
    mt_item_bool(p, "add_position_embedding", s->position_embedding_type == MT_POSITION_LEARNED_ABSOLUTE);
    mt_item_bool(p, "use_rotary_position_embeddings", s->position_embedding_type == MT_POSITION_ROPE);
    if (s->softmax_scale > 0) mt_item_real(p, "softmax_scale", s->softmax_scale);
    mt_item_bool(p, "rotary_interleaved", s->rotary_interleaved && !mt_is_latent(s)); // which always has it
    if (mt_is_latent(s)) {
        bool is_scaled = s->rope_scaling_type == MT_ROPE_SCALING_YARN;
        mt_item_text(p, "rope_type", is_scaled ? "yarn" : "rope");
        mt_item_real(p, "rotary_scaling_factor", is_scaled ? s->rope_scaling_factor : 1);
        mt_item_real(p, "mscale", is_scaled ? mt_yarn_mscale_of(s) : 1);
        mt_item_real(p, "mscale_all_dim", is_scaled ? s->yarn_mscale_all_dim : 0);
        mt_item_real(p, "beta_fast", s->yarn_beta_fast);
        mt_item_real(p, "beta_slow", s->yarn_beta_slow);
        if (is_scaled) mt_item_int(p, "original_max_position_embeddings", s->original_max_position_embeddings);
    }
    if (s->rope_scaling_type == MT_ROPE_SCALING_LLAMA3) {
        mt_item_bool(p, "use_rope_scaling", true);
        mt_item_real(p, "rope_scaling_factor", s->rope_scaling_factor);
    }
    if (s->rope_scaling_type == MT_ROPE_SCALING_LINEAR)
        mt_item_real(p, "rotary_seq_len_interpolation_factor", s->rope_scaling_factor);
    mt_item_bool(p, "apply_query_key_layer_scaling", false);
    mt_item_int(p, "make_vocab_size_divisible_by", 128);
    mt_item_int(p, "padded_vocab_size", mt_divide_up(s->vocab_size, 128) * 128); // a loader pads the tensors
    mt_item_int(p, "data_parallel_size", grid->data.size);
    mt_item_int(p, "world_size", grid->world.size);
    mt_item_none(p, "virtual_pipeline_model_parallel_size");
    mt_item_int(p, "iteration", state->iteration);
    mt_item_int(p, "consumed_train_samples", state->consumed_train_samples);
    mt_item_int(p, "consumed_valid_samples", state->consumed_valid_samples);
    mt_item_int(p, "skipped_train_samples", 0);
    mt_pickle_text(p, "params_dtype");
    mt_pickle_global(p, mt_torch_dtype(dtype));
    mt_item_text(p, "ckpt_format", "torch_dist");
    mt_item_bool(p, "use_distributed_optimizer", states);
    mt_item_bool(p, "no_save_rng", true); // random numbers are functions of --seed here
    mt_object_end(p);
}

/* A group of parameters of torch's or Transformer Engine's Adam: those with weight decay, or those without. */
static void mt_group_write(mt_pickler *p, const mt_options *o, const mt_run_state *state, bool decays, bool experts) {
    mt_dict_begin(p);
    mt_item_bool(p, "is_expert_parallel", experts);
    mt_item_bool(p, "default_config", true);
    mt_item_real(p, "wd_mult", decays);
    mt_item_real(p, "lr_mult", 1);
    mt_item_bool(p, "is_decoupled_lr", false);
    mt_item_real(p, "max_lr", o->lr);
    mt_item_real(p, "min_lr", o->min_lr);
    mt_item_real(p, "lr", mt_learning_rate(o, mt_scheduled_samples(state)));
    mt_pickle_text(p, "betas");
    mt_pickle_real(p, o->adam_beta1);
    mt_pickle_real(p, o->adam_beta2);
    mt_pickle_op(p, '\x86'); // TUPLE2
    mt_item_real(p, "eps", o->adam_eps);
    mt_item_real(p, "weight_decay", decays ? mt_weight_decay(o, mt_scheduled_samples(state)) : 0);
    mt_item_int(p, "step", state->optimizer_step);
    mt_item_bool(p, "bias_correction", true);
    static const char *const falses[] = {"amsgrad", "maximize", "capturable", "differentiable"};
    for (size_t i = 0; i < sizeof falses / sizeof *falses; i++) mt_item_bool(p, falses[i], false);
    mt_item_none(p, "foreach");
    mt_item_none(p, "fused");
    mt_item_bool(p, "decoupled_weight_decay", true);
    mt_dict_end(p);
}

/* "param_groups" and "state" of one of Megatron-Core's optimizers. */
static void mt_groups_write(mt_pickler *p, const mt_options *o, const mt_run_state *state, bool experts) {
    mt_pickle_text(p, "param_groups");
    mt_list_begin(p);
    mt_group_write(p, o, state, true, experts);
    if (!experts) mt_group_write(p, o, state, false, false);
    mt_list_end(p);
    mt_pickle_text(p, "state");
    mt_dict_begin(p);
    mt_item_int(p, "common_step", state->optimizer_step);
    mt_dict_end(p);
}

/* An optimizer: of fp32 parameters these two; the plain one of bf16 and the distributed one have them in "optimizer".
 */
static void mt_optimizer_write(mt_pickler *p, const mt_options *o, const mt_run_state *state, bool experts) {
    mt_dict_begin(p);
    mt_groups_write(p, o, state, experts);
    mt_pickle_text(p, "optimizer");
    mt_dict_begin(p);
    mt_groups_write(p, o, state, experts);
    mt_dict_end(p);
    mt_item_text(p, "param_state_sharding_type", "fully_reshardable");
    mt_dict_end(p);
}

/* Megatron-LM's own schedule, in samples. */
static void mt_schedule_write(mt_pickler *p, const mt_run_options *run, const mt_run_state *state) {
    static const struct {
        const char *key;
        size_t offset;
    } choices[] = {{"lr_decay_style", MT_AT(stack.lr_decay_style)},
                   {"wd_incr_style", MT_AT(stack.weight_decay_incr_style)}};
    const mt_options *o = &run->stack;
    mt_durations d = mt_options_durations(o);
    mt_dict_begin(p);
    mt_item_real(p, "max_lr", o->lr);
    mt_item_real(p, "min_lr", o->min_lr);
    mt_item_int(p, "lr_warmup_steps", (int64_t)d.warmup);
    mt_item_int(p, "lr_decay_steps", (int64_t)d.decay);
    mt_item_int(p, "num_steps", mt_scheduled_samples(state));
    mt_item_real(p, "start_wd", o->start_weight_decay);
    mt_item_real(p, "end_wd", o->end_weight_decay);
    mt_item_int(p, "wd_incr_steps", (int64_t)d.total);
    for (int i = 0; i < 2; i++) {
        mt_pickle_text(p, choices[i].key);
        mt_arg_write(p, run, mt_option_of(choices[i].offset), MT_ARG_ALWAYS);
    }
    mt_dict_end(p);
}

void mt_dist_common_make(const mt_run_options *o, const mt_grid *grid, const mt_run_state *state, bool states,
                         mt_dtype dtype, mt_bytes *file) {
    mt_pickler p;
    mt_archive archive;
    mt_pickler_begin(&p);
    mt_dict_begin(&p);
    mt_pickle_text(&p, "args");
    mt_dist_write_args(&p, o, grid, state, states, dtype);
    mt_item_real(&p, "checkpoint_version", 3);
    mt_item_int(&p, "iteration", state->iteration);
    mt_pickle_text(&p, "content_metadata");
    mt_dict_begin(&p);
    if (states) {
        mt_item_text(&p, "distrib_optim_sharding_type", "fully_reshardable");
        mt_item_bool(&p, "distrib_optim_fully_reshardable_mem_efficient", false);
    }
    mt_item_bool(&p, "singleton_local_shards", false);
    mt_item_bool(&p, "chained_optim_avoid_prefix", true);
    mt_dict_end(&p);
    if (states) {
        mt_pickle_text(&p, "opt_param_scheduler");
        mt_schedule_write(&p, o, state);
        mt_pickle_text(&p, "optimizer");
        if (mt_has_experts(&o->stack) && o->stack.expert_model_parallel_size > 1) { // experts have their own optimizer
            mt_dict_begin(&p);
            for (int i = 0; i < 2; i++) {
                mt_pickle_int(&p, i);
                mt_optimizer_write(&p, &o->stack, state, i == 1);
            }
            mt_dict_end(&p);
        } else {
            mt_optimizer_write(&p, &o->stack, state, false);
        }
    }
    mt_dict_end(&p);
    mt_pickler_end(&p);
    mt_archive_make(&archive, &p.out, -1, 0);
    free(p.out.data);
    *file = archive.head;
}
