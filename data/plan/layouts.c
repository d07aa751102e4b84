/* layouts.c: the search for the fastest layouts. A layout is a list of settings, which a copy of the given options
 * takes before it is finished, as it does those of a command line: so the rules exist once. All are listed first, each
 * with a least time of its step: the times of layers in models of one and two layers, put together by the pipeline's
 * schedule. In the order of this time they are checked, their memory is counted, and layouts with room are simulated,
 * until no least time can be among the best. */
#include "layouts.h"

#include "../options/option_source.h"
#include "../options/option_rules.h"
#include "../options/option_table.h"
#include "../options/options.h"
#include "balance.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#pragma GCC diagnostic ignored "-Wmissing-field-initializers" // constraints without numbers

/* ---- the list of layouts */

enum {
    MT_SHARD_CHOICES = 2,
    MT_RECOMPUTE_CHOICES = 3,
    MT_BALANCED_LAYERS = 1024,
    MT_LARGEST_BATCH = 1 << 20 // lists of a pipeline's micro-batches take memory
};

/* Times of layers, once they are known. */
typedef struct mt_known_seconds {
    bool is_known, is_refused; // refused: a model of one stage is not legal
    mt_layer_seconds seconds;
} mt_known_seconds;

/* Layouts of equal tensor, context and expert ranks and micro-batches: on any number of stages their layers take the
 * same time, apart from communication of replicas. */
typedef struct mt_sizes {
    mt_known_seconds layers[MT_RECOMPUTE_CHOICES];
    int64_t micro_batch, smaller; // sizes with the next smaller micro-batch; -1: none
} mt_sizes;

/* Sizes on a number of stages, where the replicas' communication counts. */
typedef struct mt_shape {
    int64_t sizes;
    mt_known_seconds layers[MT_SHARD_CHOICES][MT_RECOMPUTE_CHOICES];
} mt_shape;

/* A layout. recompute: nothing, some modules, all. sharding: the optimizer (nothing on one rank), everything. Layouts
 * of a family differ in these two only. */
typedef struct mt_candidate {
    int64_t tp, pp, cp, ep, etp, vp, micro_batch; // etp: 0 without experts, or as it is given
    bool zero_bubble, balanced;
    int sharding, recompute;
    int64_t shape, family, number, round; // rounds after the first one have a larger micro-batch each, above 16
    double least;                         // seconds that the step takes at least
} mt_candidate;

/* The facts of the model and the run that decide which layouts exist, and what is known of them. */
typedef struct mt_search {
    mt_layouts *out;
    const mt_run_options *given;
    const mt_machine *machine;
    int64_t most_attempts;
    int64_t least_tp, least_pp, least_cp;
    mt_run_options model; // finished, for some ranks
    mt_candidate *list;
    mt_sizes *sizes;
    mt_shape *shapes;
    double *seconds; // [families, shardings, recomputations] steps of simulated layouts; 0: none
    int64_t count, num_sizes, num_shapes, num_families;
} mt_search;

/* Adds a setting of an option, unless `given` (NULL: nothing is) has the option. value NULL: a flag. */
static void mt_layout_set(mt_givens *settings, const mt_run_options *given, size_t field, const char *value) {
    if (given && mt_options_gave(given, field)) return;
    mt_given *setting = mt_givens_add(settings, MT_SOURCE_COMMAND_LINE, MT_GIVEN_WORDS, "", mt_option_of(field)->name);
    if (value) mt_strings_add(&setting->values, value);
}
static void mt_layout_set_number(mt_givens *settings, const mt_run_options *given, size_t field, int64_t number) {
    char value[32];
    snprintf(value, sizeof value, "%lld", (long long)number);
    mt_layout_set(settings, given, field, value);
}

/* True if --tp-comm-overlap is possible: all tensor groups lie within hosts. */
static bool mt_candidate_overlaps(const mt_candidate *c, const mt_run_options *o) {
    bool nests = o->gpus <= o->gpus_per_host || o->gpus_per_host % c->tp == 0;
    return c->tp > 1 && c->tp <= MT_MAILBOX_RANKS && nests;
}

/* True if gathering all tokens sends fewer bytes than sending each to its experts: with `ep` ranks a token has topk /
 * ep experts on each. */
static bool mt_candidate_gathers(const mt_candidate *c, const mt_run_options *o) {
    bool given = MT_GIVEN(o, stack.expert_tensor_parallel_size);
    int64_t etp = given ? o->stack.expert_tensor_parallel_size : c->tp > 1 ? mt_max(c->etp, 1) : 1;
    return o->stack.num_experts > 0 && c->ep * etp > 1 && c->ep < o->stack.moe_router_topk &&
           !o->stack.moe_pad_expert_input_to_capacity;
}

/* The layout's settings, added to an empty list; `folded`: letters of balanced stages. */
static void mt_candidate_settings(const mt_candidate *c, const mt_run_options *o, const char *folded, mt_givens *list) {
    int64_t replicas = o->gpus / (c->tp * c->pp);
    bool reduces = o->stack.overlap_grad_reduce || !MT_GIVEN(o, stack.overlap_grad_reduce);
    bool shards = o->use_distributed_optimizer || !MT_GIVEN(o, use_distributed_optimizer);
    if (MT_GIVEN(o, stack.data_parallel_sharding_strategy))
        shards = o->stack.data_parallel_sharding_strategy != MT_NO_SHARD;
    mt_layout_set_number(list, o, MT_AT(stack.tensor_model_parallel_size), c->tp);
    if (c->tp > 1 && !o->stack.distribute_saved_activations) // excluded
        mt_layout_set(list, o, MT_AT(stack.sequence_parallel), NULL);
    bool splits =
        MT_GIVEN(o, stack.sequence_parallel) ? o->stack.sequence_parallel : !o->stack.distribute_saved_activations;
    if (mt_candidate_overlaps(c, o) && splits) mt_layout_set(list, o, MT_AT(stack.tp_comm_overlap), NULL);
    mt_layout_set_number(list, o, MT_AT(stack.pipeline_model_parallel_size), c->pp);
    if (c->balanced)
        mt_layout_set(list, o, MT_AT(pipeline_model_parallel_layout), folded);
    else if (c->vp > 1)
        mt_layout_set_number(list, o, MT_AT(stack.num_virtual_stages_per_pipeline_rank), c->vp);
    if (c->zero_bubble) mt_layout_set(list, o, MT_AT(stack.pipeline_schedule), "zb-h1");
    if (c->cp > 1) mt_layout_set_number(list, o, MT_AT(stack.context_parallel_size), c->cp);
    if (o->stack.num_experts > 0) mt_layout_set_number(list, o, MT_AT(stack.expert_model_parallel_size), c->ep);
    if (c->tp > 1 && c->etp > 0) mt_layout_set_number(list, o, MT_AT(stack.expert_tensor_parallel_size), c->etp);
    if (mt_candidate_gathers(c, o)) mt_layout_set(list, o, MT_AT(stack.moe_token_dispatcher_type), "allgather");
    mt_layout_set_number(list, o, MT_AT(stack.micro_batch_size), c->micro_batch);
    if (replicas > 1 && !MT_GIVEN(o, use_distributed_optimizer))
        mt_layout_set(list, o, MT_AT(stack.data_parallel_sharding_strategy),
                      c->sharding ? "optim_grads_params" : "optim");
    if (replicas > 1) mt_layout_set(list, o, MT_AT(stack.overlap_grad_reduce), NULL);
    if (replicas > 1 && reduces && shards) mt_layout_set(list, o, MT_AT(stack.overlap_param_gather), NULL);
    if (c->recompute == 0) return;
    mt_layout_set(list, o, MT_AT(stack.recompute_granularity), c->recompute == 2 ? "full" : "selective");
    if (c->recompute != 1 || MT_GIVEN(o, stack.recompute_granularity) || MT_GIVEN(o, stack.recompute_modules)) return;
    mt_layout_set(list, o, MT_AT(stack.recompute_modules), "layernorm");
    const char *second = o->stack.num_experts == 0 ? "mlp" : o->stack.moe_grouped_gemm ? "moe_act" : NULL;
    if (second) mt_strings_add(&list->items[list->count - 1].values, second);
}

/* The settings as words of a command line, in a shell's quotes where they need them. */
static void mt_settings_print(const mt_givens *list, char line[MT_LAYOUT_LINE]) {
    int length = 0;
    *line = 0;
    for (int64_t i = 0; i < list->count; i++) {
        const mt_strings *values = &list->items[i].values;
        length += snprintf(line + length, (size_t)(MT_LAYOUT_LINE - length), " --%s", list->items[i].name);
        for (int64_t j = 0; j < values->count; j++) {
            const char *quote = strpbrk(values->items[j], "|*()") ? "'" : "";
            length +=
                snprintf(line + length, (size_t)(MT_LAYOUT_LINE - length), " %s%s%s", quote, values->items[j], quote);
        }
    }
}

/* Room for one more record after `count`: doubles it at powers of two. */
static void *mt_search_grow(void *records, int64_t count, size_t size) {
    if (count > 0 && (count & (count - 1)) != 0) return records;
    return mt_realloc(records, mt_max(2 * count, 1) * (int64_t)size);
}

/* Adds a candidate and its variants of sharding and recomputation. */
static void mt_search_add(mt_search *s, mt_candidate c) {
    const mt_run_options *o = s->given;
    int64_t replicas = o->gpus / (c.tp * c.pp * c.cp);
    bool shards = replicas * c.cp > 1 && !c.zero_bubble && !MT_GIVEN(o, stack.data_parallel_sharding_strategy) &&
                  !MT_GIVEN(o, use_distributed_optimizer) && o->stack.lora_base_dtype != MT_BASE_FP8;
    bool chosen = MT_GIVEN(o, stack.recompute_granularity) || o->recompute_activations || o->moe_layer_recompute;
    c.family = s->num_families++;
    for (c.sharding = 0; c.sharding <= shards; c.sharding++)
        for (c.recompute = 0; c.recompute < (chosen ? 1 : MT_RECOMPUTE_CHOICES); c.recompute++) {
            s->out->considered++;
            c.number = s->count;
            s->list = mt_search_grow(s->list, s->count, sizeof *s->list);
            s->list[s->count++] = c;
        }
}

/* True if the user decided on the stages of ranks. */
static bool mt_search_stages_given(const mt_run_options *o) {
    return MT_GIVEN(o, stack.num_virtual_stages_per_pipeline_rank) || MT_GIVEN(o, pipeline_model_parallel_layout) ||
           MT_GIVEN(o, num_layers_per_virtual_pipeline_stage) || MT_GIVEN(o, stack.pipeline_schedule) ||
           MT_GIVEN(o, stack.decoder_first_pipeline_num_layers) ||
           MT_GIVEN(o, stack.decoder_last_pipeline_num_layers) || o->stack.account_for_embedding_in_pipeline_split ||
           o->stack.account_for_loss_in_pipeline_split;
}

/* Schedules of a pipeline: one stage a rank, zero-bubble, or several stages, any number that divides the layers. 1, 2,
 * 4 and 8 are also balanced, but not for more than MT_BALANCED_LAYERS, which would take seconds. */
static void mt_search_schedules(mt_search *s, mt_candidate c) {
    const mt_run_options *o = s->given;
    c.vp = 1;
    if (c.pp == 1 || mt_search_stages_given(o)) {
        mt_search_add(s, c);
        return;
    }
    for (c.vp = 1; c.vp * c.pp <= o->stack.num_layers; c.vp++) {
        bool equal = o->stack.num_layers % (c.pp * c.vp) == 0;
        bool balances = c.vp <= 8 && (c.vp & (c.vp - 1)) == 0 && o->stack.num_layers <= MT_BALANCED_LAYERS;
        for (int balanced = equal ? 0 : 1; balanced <= balances; balanced++) {
            c.balanced = balanced, c.zero_bubble = false;
            mt_search_add(s, c);
            c.zero_bubble = true;
            if (c.vp == 1) mt_search_add(s, c);
        }
    }
}

/* The least size of a dimension: 2 if an option was given that is for several ranks of it. */
static int64_t mt_least_size(const mt_run_options *o, size_t size) {
    mt_option_rule rule;
    for (const mt_option *row = mt_option_table; row->help; row++)
        for (const char *column = row->name ? row->needs : NULL; mt_option_next_rule(&column, &rule);)
            if (rule.other->offset == size && !rule.condition && !rule.choices && mt_option_used(o, row)) return 2;
    return 1;
}

/* The next size of a dimension, or the given one only. */
static int64_t mt_next_size(int64_t size, bool is_given) {
    return is_given ? (int64_t)1 << 31 : size + 1; // more than any number of ranks
}

/* The numbers of stages of a layout of given sizes. False: none. */
static bool mt_search_stages(mt_search *s, mt_candidate c, int64_t smaller) {
    const mt_run_options *o = s->given;
    bool pp = MT_GIVEN(o, stack.pipeline_model_parallel_size), any = false;
    int64_t model = c.tp * c.cp, experts = c.ep * mt_max(c.etp, 1);
    int64_t first = pp ? o->stack.pipeline_model_parallel_size : s->least_pp;
    for (c.pp = first; c.pp <= (pp ? mt_min(first, o->stack.num_layers) : o->stack.num_layers); c.pp++) {
        if (o->gpus % (model * c.pp) != 0 || o->gpus % (experts * c.pp) != 0) continue;
        if (o->stack.global_batch_size % (c.micro_batch * (o->gpus / (model * c.pp))) != 0) continue;
        if (!any) {
            s->sizes = mt_search_grow(s->sizes, s->num_sizes, sizeof *s->sizes);
            s->sizes[s->num_sizes++] = (mt_sizes){.micro_batch = c.micro_batch, .smaller = smaller};
            any = true;
        }
        c.shape = s->num_shapes;
        s->shapes = mt_search_grow(s->shapes, s->num_shapes, sizeof *s->shapes);
        s->shapes[s->num_shapes++] = (mt_shape){.sizes = s->num_sizes - 1};
        mt_search_schedules(s, c);
    }
    return any;
}

/* The micro-batches of a layout of given ranks: all that divide the batch. */
static void mt_search_micro_batches(mt_search *s, mt_candidate c) {
    const mt_run_options *o = s->given;
    bool given = MT_GIVEN(o, stack.micro_batch_size);
    int64_t smaller = -1, batch = o->stack.global_batch_size;
    for (c.micro_batch = given ? o->stack.micro_batch_size : 1; c.micro_batch <= batch;
         c.micro_batch = mt_next_size(c.micro_batch, given))
        if (batch % c.micro_batch == 0 && mt_search_stages(s, c, smaller)) {
            smaller = s->num_sizes - 1;
            c.round += c.micro_batch >= 16;
        }
}

/* Expert ranks: those of the layer's tensor ranks share an expert, or none do. */
static void mt_search_experts(mt_search *s, mt_candidate c) {
    const mt_run_options *o = s->given;
    bool ep = MT_GIVEN(o, stack.expert_model_parallel_size) || o->stack.num_experts == 0;
    bool etp = MT_GIVEN(o, stack.expert_tensor_parallel_size) || o->stack.num_experts == 0;
    for (c.ep = ep ? mt_max(o->stack.expert_model_parallel_size, 1) : 1;
         c.ep <= mt_max(o->stack.num_experts, 1) && c.ep <= o->gpus; c.ep = mt_next_size(c.ep, ep)) {
        if (!ep && o->stack.num_experts % c.ep != 0) continue;
        c.etp = etp ? o->stack.expert_tensor_parallel_size : 1;
        mt_search_micro_batches(s, c);
        c.etp = c.tp;
        if (!etp && c.tp > 1) mt_search_micro_batches(s, c);
    }
}

static void mt_search_list(mt_search *s) {
    const mt_run_options *o = s->given;
    mt_candidate c = {0};
    int64_t gpus = o->gpus;
    bool tp = MT_GIVEN(o, stack.tensor_model_parallel_size), cp = MT_GIVEN(o, stack.context_parallel_size);
    int64_t most = mt_min(o->gpus_per_host, gpus);
    for (c.tp = tp ? o->stack.tensor_model_parallel_size : s->least_tp; c.tp <= (tp ? gpus : most);
         c.tp = mt_next_size(c.tp, tp))
        for (c.cp = cp ? o->stack.context_parallel_size : s->least_cp; c.tp * c.cp <= gpus;
             c.cp = mt_next_size(c.cp, cp)) {
            if (gpus % (c.tp * c.cp) != 0 || (!cp && c.cp > 1 && o->stack.seq_length / c.cp < 2048)) continue;
            mt_search_experts(s, c);
        }
}

/* ---- options of layouts */

void mt_options_assume_run(mt_run_options *o) {
    bool has_data = o->data_path.count > 0 || o->train_data_path.count > 0 || o->tokens_file;
    if (!has_data) o->mock_data = true;
    if (o->stack.train_iters == 0 && o->stack.train_samples == 0 && o->train_epochs == 0) o->stack.train_iters = 1;
    if (o->stack.lr == 0) o->stack.lr = 1e-4;
}

/* Writes letters of a layout with repeats folded: E and t*5 within a stage, (t*4|)*3 for equal stages. */
static void mt_letters_fold(const char *letters, char *text, size_t room) {
    size_t length = 0;
    while (letters && *letters && length + 64 < room) {
        size_t stage = strcspn(letters, "|"), times = 1, whole = letters[stage] == '|' ? stage + 1 : stage;
        while (letters[stage] == '|' && strncmp(letters + times * whole, letters, whole) == 0) times++;
        if (times > 1) text[length++] = '(';
        for (size_t i = 0, run; i < stage; i += run) {
            run = strspn(letters + i, (char[]){letters[i], 0});
            if (i + run > stage) run = stage - i;
            length += (size_t)snprintf(text + length, room - length, run > 1 ? "%c*%zu" : "%c", letters[i], run);
        }
        if (letters[stage] == '|') text[length++] = '|';
        if (times > 1) length += (size_t)snprintf(text + length, room - length, ")*%zu", times);
        letters += times * whole;
    }
    text[length] = 0;
}

/* The options that were given, with a layout's settings. */
static int mt_search_vary(const mt_search *s, const mt_givens *settings, mt_run_options *o, mt_error *error) {
    mt_options_copy(o, s->given);
    mt_option_reader reader = {.options = o, .program = MT_PROGRAM_TRAIN};
    int status = mt_givens_take(settings, &reader, NULL, error);
    if (status == 0) status = mt_option_reader_report(&reader, error);
    mt_option_reader_free(&reader);
    return status;
}

/* The same, finished. Frees the settings. */
static int mt_search_finish(const mt_search *s, mt_givens *settings, int64_t ranks, mt_run_options *o,
                            mt_error *error) {
    int status = mt_search_vary(s, settings, o, error);
    mt_givens_free(settings);
    return status != 0 ? -1 : mt_train_options_finish(o, ranks, error);
}

/* ---- least times */

/* The options of a candidate without its pipeline: for a model of one stage, on the GPUs of a stage. */
static int mt_search_one_stage(const mt_search *s, const mt_candidate *c, mt_run_options *o, mt_error *error) {
    static const size_t of_pipeline[] = {
        offsetof(mt_run_options, stack.pipeline_model_parallel_size),
        offsetof(mt_run_options, pipeline_model_parallel_layout),
        offsetof(mt_run_options, stack.num_virtual_stages_per_pipeline_rank),
        offsetof(mt_run_options, num_layers_per_virtual_pipeline_stage),
        offsetof(mt_run_options, stack.microbatch_group_size_per_virtual_pipeline_stage),
        offsetof(mt_run_options, stack.pipeline_schedule),
        offsetof(mt_run_options, stack.account_for_embedding_in_pipeline_split),
        offsetof(mt_run_options, stack.account_for_loss_in_pipeline_split),
        offsetof(mt_run_options, stack.decoder_first_pipeline_num_layers),
        offsetof(mt_run_options, stack.decoder_last_pipeline_num_layers)};
    mt_candidate plain = *c;
    mt_givens settings = {0};
    plain.vp = 1, plain.balanced = plain.zero_bubble = false;
    mt_candidate_settings(&plain, s->given, "", &settings);
    int status = mt_search_vary(s, &settings, o, error);
    mt_givens_free(&settings);
    if (status != 0) return -1;
    for (size_t i = 0; i < sizeof of_pipeline / sizeof *of_pipeline; i++)
        mt_option_reset(o, mt_option_of(of_pipeline[i]));
    return mt_train_options_finish(o, s->given->gpus / c->pp, error);
}

/* Simulates layers in a model of one stage; false with error if that model is not legal. */
static bool mt_search_know(const mt_search *s, const mt_candidate *c, int64_t micro_batches, mt_known_seconds *layers,
                           mt_error *error) {
    int64_t gpus = s->given->gpus / c->pp;
    mt_run_options o;
    if (layers->is_known || layers->is_refused) return layers->is_known;
    s->out->attempts++;
    layers->is_known = mt_search_one_stage(s, c, &o, error) == 0 &&
                       mt_layer_seconds_of(&layers->seconds, &o.stack, gpus, micro_batches, s->machine, error) == 0;
    mt_options_free(&o);
    layers->is_refused = !layers->is_known;
    return layers->is_known;
}

/* ---- least memory */

static double mt_candidate_micro_batches(const mt_search *s, const mt_candidate *c) {
    return (double)(s->given->stack.global_batch_size * c->tp * c->pp * c->cp) /
           (double)(s->given->gpus * c->micro_batch);
}

/* Bytes of a layer in `live` micro-batches on a rank, without scratch. */
static double mt_layer_bytes(const mt_search *s, const mt_candidate *c, const mt_layer_seconds *layers, int cost,
                             double live) {
    bool whole =
        s->model.stack.data_parallel_sharding_strategy <= MT_SHARD_OPTIM && !s->model.stack.optimizer_cpu_offload;
    return live * layers->saved[cost] + (whole && !c->sharding ? layers->states[cost] : 0);
}

/* True if a GPU has no room for a model of such layers. Known are the layers of the first rank, which holds most
 * micro-batches, of equal stages or of those of `letters`; else some rank has its share of them. Scratch counts on one
 * stage only, or half of it: that of a layer or that of all else,
 * which are on some rank. */
static bool mt_candidate_too_large(const mt_search *s, const mt_candidate *c, const mt_layer_seconds *layers,
                                   const char *letters) {
    int64_t L = s->model.stack.num_layers, layer = 0;
    double live = fmin((double)c->pp, mt_candidate_micro_batches(s, c)),
           bytes = mt_machine_context(s->machine, s->given->gpus > 1);
    bool equal = c->pp == 1 || (!c->balanced && !mt_search_stages_given(s->given));
    if (bytes + layers->activations / 2 > s->machine->memory_gib) return true;
    if (c->pp == 1) bytes += layers->activations - layers->saved[layers->single];
    if (!letters && !equal) {
        double least = INFINITY;
        for (; layer < L; layer++)
            least = fmin(least, mt_layer_bytes(s, c, layers, mt_layer_cost(&s->model.stack, layer), 1));
        return bytes + least * (double)mt_divide_up(L, c->pp) > s->machine->memory_gib;
    }
    for (int64_t stage = 0; stage < c->pp * c->vp; stage++) {
        int64_t count = L / (c->pp * c->vp);
        if (letters) letters += strspn(letters, "E|"), count = (int64_t)strspn(letters, "t"), letters += count;
        for (; count > 0; count--, layer++)
            if (stage % c->pp == 0) bytes += mt_layer_bytes(s, c, layers, mt_layer_cost(&s->model.stack, layer), live);
    }
    return bytes > s->machine->memory_gib;
}

/* The part of the time of fully sharded layers that is certain: where communication takes longer than computation,
 * gathers and reductions of neighbouring micro-batches overlap. Layouts that took less, down to 0.77 of it, have few
 * micro-batches on hosts of one or two GPUs; none of them was among the ten best. */
#define MT_SHARDED_SHARE 0.9

/* The least time of a pipeline's rank for a micro-batch: of all its stages, and of the first one. */
typedef struct mt_rank_seconds {
    double all, forward, backward;
} mt_rank_seconds;

/* Of equal stages, or of those of `letters`. */
static void mt_ranks_count(mt_rank_seconds *ranks, const mt_search *s, const mt_candidate *c,
                           const mt_layer_seconds *layers, const char *letters) {
    int64_t layer = 0, equal = s->model.stack.num_layers / (c->pp * c->vp);
    memset(ranks, 0, (size_t)c->pp * sizeof *ranks);
    for (int64_t stage = 0; stage < c->pp * c->vp; stage++) {
        mt_rank_seconds *rank = &ranks[stage % c->pp];
        int64_t count = equal;
        if (letters) {
            letters += strspn(letters, "E|");
            count = (int64_t)strspn(letters, "t");
            letters += count;
        }
        for (; count > 0; count--, layer++) {
            const double *seconds = layers->least[mt_layer_cost(&s->model.stack, layer)];
            rank->all += seconds[0] + seconds[1];
            if (stage < c->pp) rank->forward += seconds[0], rank->backward += seconds[1];
        }
    }
    ranks[c->pp - 1].all += layers->least_head;
}

/* A rank's first forward waits for those of the ranks before it, and the first rank's last backward for those of the
 * ranks after it. Long schedules are simulated by their first 4 pp micro-batches. */
static double mt_ranks_join(const mt_rank_seconds *ranks, const mt_candidate *c, double micro_batches) {
    double joined = fmin(micro_batches, 4 * (double)c->pp), forward = 0, both = 0, longest = 0;
    for (int64_t i = 0; i < c->pp; i++) {
        longest = fmax(longest, micro_batches * ranks[i].all + forward);
        if (!c->zero_bubble) // where the weights' part of the backward may come later
            longest = fmax(longest, (micro_batches - joined) * ranks[0].all + joined * ranks[i].all + both);
        forward += ranks[i].forward, both += ranks[i].forward + ranks[i].backward;
    }
    return longest;
}

/* The least time of a step of such layers. Where the stages are not known, the ranks share the work in the best way:
 * equally, or, with a pipeline's waiting, each later rank has a little less to do. */
static double mt_candidate_least(const mt_search *s, const mt_candidate *c, const mt_layer_seconds *layers,
                                 const char *letters) {
    const mt_run_options *o = s->given;
    double micro_batches = mt_candidate_micro_batches(s, c);
    bool equal = c->pp > 1 && !c->balanced && !mt_search_stages_given(o);
    if (equal || letters) {
        mt_rank_seconds *ranks = mt_malloc(c->pp * (int64_t)sizeof *ranks);
        mt_ranks_count(ranks, s, c, layers, letters);
        double seconds = mt_ranks_join(ranks, c, micro_batches);
        free(ranks);
        return seconds;
    }
    double all = layers->least_rest, stages = (double)c->pp;
    for (int64_t i = 0; i < s->model.stack.num_layers; i++) {
        const double *layer = layers->least[mt_layer_cost(&s->model.stack, i)];
        all += layer[0] + layer[1];
    }
    bool waits = c->balanced && c->vp == 1 && !c->zero_bubble && micro_batches <= 4 * stages;
    return waits ? all / (1 - pow(1 - 1 / micro_batches, stages)) : micro_batches * all / stages;
}

/* The part of a larger micro-batch's least time that is certain from two smaller ones, whose difference it adds: its
 * products may fill their last tiles better. */
#define MT_LARGER_SHARE 0.9

/* Least times and bytes of a micro-batch from the two next smaller ones that are known, or from one: not less than its
 * own. Saved activations are proportional. */
static bool mt_sizes_guess(const mt_search *s, mt_layer_seconds *t, const mt_sizes *sizes, int recompute) {
    const mt_sizes *known[2] = {NULL, NULL};
    for (int64_t i = sizes->smaller; i >= 0 && !known[1]; i = s->sizes[i].smaller)
        if (s->sizes[i].layers[recompute].is_known) known[known[0] != NULL] = &s->sizes[i];
    if (!known[0]) return false;
    *t = known[0]->layers[recompute].seconds;
    for (int i = 0; i < 2; i++) t->saved[i] *= (double)sizes->micro_batch / (double)known[0]->micro_batch;
    if (!known[1]) return true;
    const mt_layer_seconds *less = &known[1]->layers[recompute].seconds;
    double more =
        (double)(sizes->micro_batch - known[0]->micro_batch) / (double)(known[0]->micro_batch - known[1]->micro_batch);
    double *to[] = {&t->least[0][0], &t->least[0][1], &t->least[1][0], &t->least[1][1], &t->least_rest, &t->least_head};
    const double *from[] = {&less->least[0][0], &less->least[0][1], &less->least[1][0],
                            &less->least[1][1], &less->least_rest,  &less->least_head};
    for (size_t i = 0; i < sizeof to / sizeof *to; i++)
        *to[i] = fmax(*to[i], MT_LARGER_SHARE * (*to[i] + more * (*to[i] - *from[i])));
    t->activations += fmax(more * (t->activations - less->activations), 0);
    return true;
}

/* Leaves out candidates of a round that have no room or are slow, as far as `guesses` from smaller micro-batches or
 * their own layers show. Returns the number of the others; they come first. */
static int64_t mt_search_sift(mt_search *s, mt_candidate *list, int64_t count, bool guesses) {
    int64_t kept = 0;
    mt_layouts *out = s->out;
    for (int64_t i = 0; i < count; i++) {
        mt_candidate c = list[i];
        const mt_sizes *sizes = &s->sizes[s->shapes[c.shape].sizes];
        mt_layer_seconds t = sizes->layers[c.recompute].seconds;
        bool is_known = guesses ? mt_sizes_guess(s, &t, sizes, c.recompute) : sizes->layers[c.recompute].is_known;
        if (is_known && mt_candidate_too_large(s, &c, &t, NULL)) {
            out->too_large++;
            continue;
        }
        if (is_known) c.least = mt_candidate_least(s, &c, &t, NULL);
        if (out->count == MT_BEST_LAYOUTS && c.least > out->best[MT_BEST_LAYOUTS - 1].simulation.seconds)
            out->bounded++;
        else
            list[kept++] = c;
    }
    return kept;
}

/* The search ends after a number of simulations, not of seconds: its list is the same on every machine. */
static bool mt_search_is_over(const mt_search *s) {
    return s->out->attempts >= s->most_attempts;
}

/* Simulates the layers of a round of candidates: of those of the most stages, as simulations of few GPUs take less
 * time. */
static void mt_search_know_round(mt_search *s, const mt_candidate *list, int64_t count) {
    mt_error unused;
    int64_t *last = mt_calloc(mt_max(s->num_sizes, 1) * MT_RECOMPUTE_CHOICES * 8); // 1 + a candidate; 0: none
    for (int64_t i = 0; i < count; i++)
        last[s->shapes[list[i].shape].sizes * MT_RECOMPUTE_CHOICES + list[i].recompute] = i + 1;
    for (int64_t i = 0; i < s->num_sizes * MT_RECOMPUTE_CHOICES; i++) {
        if (last[i] == 0 || mt_search_is_over(s)) continue;
        mt_candidate c = list[last[i] - 1];
        c.sharding = 0;
        mt_search_know(s, &c, 2, &s->sizes[i / MT_RECOMPUTE_CHOICES].layers[c.recompute], &unused);
    }
    free(last);
}

/* Letters of a candidate's balanced stages, to free. */
static char *mt_search_letters(const mt_search *s, const mt_candidate *c, const mt_layer_seconds *layers) {
    mt_options model = s->model.stack; // its strings are not freed
    model.micro_batch_size = c->micro_batch;
    model.data_parallel_size = s->given->gpus / (c->tp * c->pp * c->cp);
    return mt_balanced_letters(&model, c->pp, c->vp, layers);
}

/* ---- the search */

static int mt_candidate_compare(const void *a, const void *b) {
    const mt_candidate *x = a, *y = b;
    if (x->round != y->round) return x->round > y->round ? 1 : -1;
    if (x->least != y->least) return x->least > y->least ? 1 : -1;
    return (x->number > y->number) - (x->number < y->number);
}

/* True if `x` is the better of two simulated layouts; of equal ones the first in the list is. */
static bool mt_layout_better(const mt_layout *x, const mt_layout *y) {
    double a = x->simulation.seconds, b = y->simulation.seconds;
    return a < b || (a == b && x->number < y->number);
}

/* Puts a simulated layout into its place among the best; frees the one that leaves. */
static void mt_layouts_insert(mt_layouts *out, mt_layout *layout) {
    int64_t at = out->count;
    for (int64_t i = 0; i < out->count; i++) { // balanced stages may be the equal ones
        mt_layout *other = &out->best[i], worse = *layout;
        if (layout->simulation.seconds != other->simulation.seconds ||
            layout->simulation.needed != other->simulation.needed)
            continue;
        if (mt_layout_better(layout, other)) worse = *other, *other = *layout;
        mt_simulation_free(&worse.simulation);
        return;
    }
    while (at > 0 && mt_layout_better(layout, &out->best[at - 1])) at--;
    if (at == MT_BEST_LAYOUTS) {
        mt_simulation_free(&layout->simulation);
        return;
    }
    if (out->count == MT_BEST_LAYOUTS)
        mt_simulation_free(&out->best[MT_BEST_LAYOUTS - 1].simulation);
    else
        out->count++;
    memmove(&out->best[at + 1], &out->best[at], (size_t)(out->count - 1 - at) * sizeof *layout);
    out->best[at] = *layout;
}

/* The step of a layout's family that shards and recomputes so much. */
static double *mt_family_seconds(const mt_search *s, const mt_candidate *c, int sharding, int recompute) {
    return &s->seconds[(c->family * MT_SHARD_CHOICES + sharding) * MT_RECOMPUTE_CHOICES + recompute];
}

/* True if a layout that takes these seconds or more cannot be among the best, or if one of its family that recomputes
 * and shards no more is as fast. */
static bool mt_search_excludes(const mt_search *s, const mt_candidate *c, double seconds) {
    const mt_layouts *out = s->out;
    if (out->count == MT_BEST_LAYOUTS && seconds > out->best[MT_BEST_LAYOUTS - 1].simulation.seconds) return true;
    for (int sharding = 0; sharding <= c->sharding; sharding++)
        for (int recompute = 0; recompute <= c->recompute; recompute++) {
            double other = *mt_family_seconds(s, c, sharding, recompute);
            if (other > 0 && seconds >= other) return true;
        }
    return false;
}

/* Checks a layout whose stages are known; simulates it if it is legal and has room. */
static void mt_search_try(mt_search *s, const mt_candidate *c, const char *letters) {
    mt_layouts *out = s->out;
    mt_layout layout = {.number = c->number};
    mt_run_options o;
    mt_givens settings = {0};
    char folded[MT_LAYOUT_LINE - 1024];
    mt_letters_fold(letters, folded, sizeof folded);
    mt_candidate_settings(c, s->given, folded, &settings);
    mt_settings_print(&settings, layout.line);
    out->attempts++;
    int status = mt_search_finish(s, &settings, s->given->gpus, &o, &out->reason);
    if (status == 0) status = mt_simulate(&layout.simulation, &o.stack, o.gpus, s->machine, &out->reason);
    if (status == MT_DOES_NOT_FIT)
        out->too_large++;
    else if (status != 0)
        out->illegal++;
    else
        out->simulated++;
    bool is_good = status == 0 && !mt_search_excludes(s, c, layout.simulation.seconds);
    if (status == 0) *mt_family_seconds(s, c, c->sharding, c->recompute) = layout.simulation.seconds;
    if (is_good)
        mt_layouts_insert(out, &layout);
    else
        mt_simulation_free(&layout.simulation);
    mt_options_free(&o);
}

/* Takes a candidate. Its least time is that of its sizes; its stages, and the replicas' communication, which full
 * sharding repeats for each micro-batch, now make it more exact. */
static void mt_search_take(mt_search *s, const mt_candidate *c) {
    mt_shape *shape = &s->shapes[c->shape];
    mt_known_seconds *here = &shape->layers[c->sharding][c->recompute];
    const mt_known_seconds *anywhere = &s->sizes[shape->sizes].layers[c->recompute];
    const mt_layer_seconds *layers = c->sharding || !anywhere->is_known ? &here->seconds : &anywhere->seconds;
    char *letters = NULL;
    double least = c->least;
    bool too_large = false;
    if (c->balanced || c->sharding) {
        if (layers == &here->seconds && !mt_search_know(s, c, 1, here, &s->out->reason)) {
            s->out->illegal++;
            return;
        }
        if (layers == &here->seconds && mt_candidate_too_large(s, c, layers, NULL)) {
            s->out->too_large++;
            return;
        }
        if (c->balanced) letters = mt_search_letters(s, c, layers);
        if (anywhere->is_known) least = mt_candidate_least(s, c, &anywhere->seconds, letters);
        if (c->sharding) least = fmax(least, MT_SHARDED_SHARE * mt_candidate_least(s, c, &here->seconds, letters));
        too_large = letters && anywhere->is_known && mt_candidate_too_large(s, c, &anywhere->seconds, letters);
    }
    if (too_large)
        s->out->too_large++;
    else if (mt_search_excludes(s, c, least))
        s->out->bounded++;
    else
        mt_search_try(s, c, letters);
    free(letters);
}

/* Reasons for which layouts are refused: how many say the same. */
enum { MT_REFUSALS = 32, MT_REFUSALS_ENOUGH = 1000 };

typedef struct mt_refusals {
    mt_error reason[MT_REFUSALS];
    int64_t times[MT_REFUSALS], count;
} mt_refusals;

static void mt_refusals_add(mt_refusals *refusals, const mt_error *reason) {
    int64_t i = 0;
    while (i < refusals->count && strcmp(refusals->reason[i].text, reason->text) != 0) i++;
    if (i == MT_REFUSALS) return;
    if (i == refusals->count) refusals->reason[refusals->count++] = *reason;
    refusals->times[i]++;
}

/* The model's options, finished for the first legal one of layouts from all over the list. If none is, error has the
 * reason that most of them have; a thousand that are refused in the same words stand for all. */
static int mt_search_legal(mt_search *s, mt_error *error) {
    mt_refusals *refusals = mt_calloc((int64_t)sizeof *refusals);
    int64_t step = s->count % 7919 ? 7919 : 7907, most = 0;
    int status = -1;
    for (int64_t i = 0; i < s->count && status != 0; i++) {
        const mt_candidate *c = &s->list[i * step % s->count];
        mt_givens settings = {0};
        char folded[32];
        if (i == MT_REFUSALS_ENOUGH && refusals->count == 1) break;
        snprintf(folded, sizeof folded, "auto*%lld", (long long)c->vp);
        mt_candidate_settings(c, s->given, folded, &settings);
        mt_options_free(&s->model);
        status = mt_search_finish(s, &settings, s->given->gpus, &s->model, error);
        if (status != 0) mt_refusals_add(refusals, error);
    }
    for (int64_t i = 0; i < refusals->count; i++)
        if (refusals->times[i] > refusals->times[most]) most = i;
    if (status != 0)
        mt_error_set(error, "no layout of %lld GPUs is legal: %.900s", (long long)s->given->gpus,
                     refusals->reason[most].text);
    free(refusals);
    return status;
}

/* The model's options, finished for the least sizes that were given or are needed, or for a layout of the list. */
static int mt_search_measure(mt_search *s, mt_error *error) {
    const mt_run_options *given = s->given;
    mt_run_options *o = &s->model;
    int64_t tp = mt_max(given->stack.tensor_model_parallel_size, s->least_tp);
    int64_t pp = mt_max(given->stack.pipeline_model_parallel_size, s->least_pp);
    int64_t cp = mt_max(given->stack.context_parallel_size, s->least_cp),
            ep = mt_max(given->stack.expert_model_parallel_size, 1);
    mt_givens least = {0}, whole = {0};
    mt_layout_set_number(&least, NULL, MT_AT(stack.tensor_model_parallel_size), tp);
    mt_layout_set_number(&least, NULL, MT_AT(stack.pipeline_model_parallel_size), pp);
    mt_layout_set_number(&least, NULL, MT_AT(stack.context_parallel_size), cp);
    int status = mt_search_finish(s, &least, tp * pp * cp * ep, o, error);
    if (status != 0 && s->count > 0) status = mt_search_legal(s, error);
    if (status != 0 && s->count == 0) { // the options that the list would have are no reason to refuse it
        mt_candidate c = {
            .tp = tp, .pp = pp, .cp = cp, .ep = ep, .etp = given->stack.expert_tensor_parallel_size, .vp = 1};
        c.micro_batch = 1, c.recompute = MT_GIVEN(given, stack.recompute_modules);
        mt_candidate_settings(&c, given, "", &whole);
        mt_options_free(o);
        status = mt_search_finish(s, &whole, tp * pp * cp * ep, o, error);
    }
    if (status == 0) status = mt_simulate_check(&o->stack, error);
    if (status != 0) return status;
    mt_error reason;
    if (mt_simulate_check_device(&o->stack, s->machine, &reason) == 0) return 0;
    return mt_error_set(error, "no layout of %lld GPUs is legal: %.900s", (long long)given->gpus, reason.text);
}

/* A search creates thousands of models. Their large arrays, which are hardly touched, are pages of their own, and all
 * other memory stays with the program. */
static void mt_search_keep_memory(void) {
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, 1 << 18);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
#endif
}

/* Takes a round's candidates in the order of their least times, until none can be among the best or the search is over.
 */
static void mt_search_round(mt_search *s, mt_candidate *list, int64_t count) {
    count = mt_search_sift(s, list, count, true);
    mt_search_know_round(s, list, count);
    for (int64_t i = 0; i < count; i++) list[i].least = 0; // where a model of one stage is not legal
    count = mt_search_sift(s, list, count, false);
    if (count > 0) qsort(list, (size_t)count, sizeof *list, mt_candidate_compare);
    for (const mt_candidate *c = list; c < list + count; c++)
        if (mt_search_excludes(s, c, c->least))
            s->out->bounded++;
        else if (mt_search_is_over(s))
            s->out->skipped++;
        else
            mt_search_take(s, c);
}

/* Takes the candidates of the smallest micro-batches, then those of the next larger ones: few of these need to be
 * simulated, and the largest take the longest time. */
static void mt_search_run(mt_search *s) {
    s->seconds = mt_calloc(mt_max(s->num_families, 1) * MT_SHARD_CHOICES * MT_RECOMPUTE_CHOICES * 8);
    if (s->count > 0) qsort(s->list, (size_t)s->count, sizeof *s->list, mt_candidate_compare);
    for (int64_t from = 0, to; from < s->count; from = to) {
        for (to = from; to < s->count && s->list[to].round == s->list[from].round;) to++;
        mt_search_round(s, s->list + from, to - from);
    }
}

/* No layout was simulated: says why. */
static int mt_search_fail(const mt_search *s, mt_error *error) {
    const mt_run_options *given = s->given;
    const mt_layouts *out = s->out;
    int64_t model = mt_max(given->stack.tensor_model_parallel_size, 1) *
                    mt_max(given->stack.pipeline_model_parallel_size, 1) *
                    mt_max(given->stack.context_parallel_size, 1);
    int64_t needed = s->least_tp * s->least_pp * s->least_cp;
    if (given->gpus < needed)
        return mt_error_set(error, "no layout of %lld GPUs is legal: options that are given need %lld or more",
                            (long long)given->gpus, (long long)needed);
    if (given->gpus % model != 0)
        return mt_error_set(
            error,
            "no layout of %lld GPUs is legal: the tensor, pipeline and context parallel sizes that are given "
            "need a multiple of %lld",
            (long long)given->gpus, (long long)model);
    if (out->considered == 0)
        return mt_error_set(
            error,
            "no layout of %lld GPUs is legal: --global-batch-size %lld is not a multiple of "
            "--micro-batch-size x data parallel size for any sizes; give another batch or other --gpus, or "
            "--context-parallel-size for fewer than 2,048 tokens a rank",
            (long long)given->gpus, (long long)given->stack.global_batch_size);
    if (out->illegal == out->considered)
        return mt_error_set(error, "no layout of %lld GPUs is legal: %.900s", (long long)given->gpus, out->reason.text);
    char skipped[80] = "";
    if (out->skipped > 0)
        snprintf(skipped, sizeof skipped, ", and %lld were left out after %lld simulations", (long long)out->skipped,
                 (long long)out->attempts);
    return mt_error_set(error,
                        "no layout fits: %lld need more than %.1f GiB of a GPU%s and %lld are not legal%s; take more "
                        "GPUs, a smaller --global-batch-size or a smaller model, or give sizes",
                        (long long)out->too_large, s->machine->memory_gib / (1 << 30),
                        s->machine->is_limited ? " (--memory-limit)" : "", (long long)out->illegal, skipped);
}

int mt_layouts_search(mt_layouts *out, const mt_run_options *given, const mt_machine *machine, int64_t most_attempts,
                      mt_error *error) {
    *out = (mt_layouts){.count = 0};
    mt_search s = {out, given, machine, most_attempts};
    if (mt_options_check_ranges(given, MT_PROGRAM_TRAIN, error) != 0) return -1; // the list would be endless
    if (given->stack.global_batch_size == 0)
        return mt_error_set(error, "--plan needs --global-batch-size: another batch would be another run");
    if (given->stack.global_batch_size > MT_LARGEST_BATCH)
        return mt_error_set(error, "--plan takes a --global-batch-size of at most %d", MT_LARGEST_BATCH);
    if (given->role)
        return mt_error_set(error, "--plan does not take --role; give the options that --print-config shows");
    s.least_tp = mt_least_size(given, MT_AT(stack.tensor_model_parallel_size));
    s.least_pp = mt_least_size(given, MT_AT(stack.pipeline_model_parallel_size));
    s.least_cp = mt_least_size(given, MT_AT(stack.context_parallel_size));
    mt_search_keep_memory();
    mt_search_list(&s);
    int status = mt_search_measure(&s, error);
    if (status == 0) mt_search_run(&s);
    mt_options_free(&s.model);
    free(s.list), free(s.sizes), free(s.shapes), free(s.seconds);
    if (status != 0 || out->count > 0) return status;
    return mt_search_fail(&s, error);
}

void mt_layouts_free(mt_layouts *out) {
    for (int64_t i = 0; i < out->count; i++) mt_simulation_free(&out->best[i].simulation);
    out->count = 0;
}
