/* layouts.c: the search for the fastest layouts. Layouts are option lines: each is parsed and finished as a command
 * line is, so that the rules exist once. All are listed first, with a bound that no machine can beat and an estimate
 * that orders them; then they are simulated, the most promising first, until no bound can be among the best. */
#include "layouts.h"

#include "option_table.h"
#include "options.h"
#include "report.h"
#include "timeline.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#pragma GCC diagnostic ignored "-Wmissing-field-initializers" // constraints without numbers

/* ---- balanced stages */

/* Seconds of the forward and backward of one layer of a kind, and of embedding and head together. */
typedef struct mt_layer_seconds {
    double dense, sparse, embedding, head;
} mt_layer_seconds;

/* Seconds of a micro-batch through a model of `count` layers, with experts or without; of them those of the embedding.
 */
static int mt_layers_seconds(double *seconds, double *embedding, const mt_options *o, int64_t ranks, int64_t count,
                             bool sparse, const mt_machine *machine, mt_error *error) {
    mt_options few = *o; // its strings are not freed
    mt_simulation simulation;
    char letters[3] = {sparse ? '1' : '0', sparse ? '1' : '0', 0};
    few.num_layers = count, few.pipeline_letters = NULL, few.mtp_num_layers = 0;
    few.bf16 = true, few.stage = MT_STAGE_PT, few.optimizer_cpu_offload = few.dynamic_context_parallel = false;
    few.global_batch_size = o->micro_batch_size * o->data_parallel_size;
    few.decoder_first_pipeline_num_layers = few.decoder_last_pipeline_num_layers = 0;
    if (o->moe_layers) few.moe_layers = letters;
    mt_machine roomy = *machine;
    roomy.memory_gib = INFINITY; // the layers of the whole model are cut elsewhere
    int status = mt_simulate(&simulation, &few, ranks, &roomy, error);
    *seconds = 0, *embedding = 0;
    if (status == 0) {
        int64_t calls;
        const mt_simulated_call *call = mt_simulated_calls(&calls);
        *seconds = simulation.pipeline[0].forward[0] + simulation.pipeline[0].backward[0];
        for (int64_t i = 0; i < calls; i++, call++)
            if (call->operation == MT_OPERATION_embedding_forward || call->operation == MT_OPERATION_embedding_backward)
                *embedding += call->to - call->from;
    }
    mt_simulation_free(&simulation);
    return status;
}

/* From models of one and two layers. */
static int mt_layer_seconds_of(mt_layer_seconds *t, const mt_options *o, int64_t ranks, const mt_machine *machine,
                               mt_error *error) {
    double one[2] = {0}, two[2] = {0}, embedding;
    bool has_sparse = mt_num_expert_layers(o) > 0, has_dense = mt_num_expert_layers(o) < o->num_layers;
    for (int sparse = 0; sparse < 2; sparse++) {
        if (sparse ? !has_sparse : !has_dense) continue;
        if (mt_layers_seconds(&one[sparse], &embedding, o, ranks, 1, sparse, machine, error) != 0) return -1;
        if (mt_layers_seconds(&two[sparse], &embedding, o, ranks, 2, sparse, machine, error) != 0) return -1;
    }
    *t = (mt_layer_seconds){two[0] - one[0], two[1] - one[1], embedding, 0};
    int kind = has_dense ? 0 : 1;
    t->head = fmax(2 * one[kind] - two[kind] - embedding, 0);
    return 0;
}

/* A model that is cut into stages. until[i]: seconds of its first i layers; first, last: what the first and the last
 * stage take besides. */
typedef struct mt_cut_model {
    int64_t num_layers, pp, vp;
    double *until; // [num_layers + 1]
    double first, last;
} mt_cut_model;

static double mt_stage_seconds(const mt_cut_model *m, int64_t stage, int64_t from, int64_t to) {
    double seconds = m->until[to] - m->until[from] + (stage == 0 ? m->first : 0);
    return seconds + (stage == m->pp * m->vp - 1 ? m->last : 0);
}

/* Layers one after another to the rank that has least to do, as if all took the same time. */
static void mt_cut_by_rank(int64_t *layers, const mt_cut_model *m) {
    double layer = m->until[m->num_layers] / (double)m->num_layers;
    int64_t *of_rank = mt_calloc(m->pp * 8);
    for (int64_t i = 0; i < m->num_layers; i++) {
        int64_t least = 0;
        double smallest = INFINITY;
        for (int64_t rank = 0; rank < m->pp; rank++) {
            double work =
                layer * (double)of_rank[rank] + (rank == 0 ? m->first : 0) + (rank == m->pp - 1 ? m->last : 0);
            if (work < smallest) smallest = work, least = rank;
        }
        of_rank[least]++;
    }
    for (int64_t stage = 0; stage < m->pp * m->vp; stage++) { // the first chunks take the remainder
        int64_t chunk = stage / m->pp, n = of_rank[stage % m->pp];
        layers[stage] = n / m->vp + (chunk < n % m->vp);
    }
    free(of_rank);
}

/* The shortest time that the longest stage can take, by bisection: each stage takes as many layers as fit. */
static double mt_cut_limit(const mt_cut_model *m) {
    int64_t stages = m->pp * m->vp;
    double low = 0, high = m->until[m->num_layers] + m->first + m->last;
    for (int i = 0; i < 50; i++) {
        double limit = (low + high) / 2;
        int64_t layer = 0;
        for (int64_t stage = 0; stage + 1 < stages; stage++)
            for (int64_t from = layer; layer < m->num_layers; layer++)
                if (mt_stage_seconds(m, stage, from, layer + 1) > limit) break;
        bool fits = mt_stage_seconds(m, stages - 1, layer, m->num_layers) <= limit && m->first <= limit;
        *(fits ? &high : &low) = limit;
    }
    return high;
}

/* The longest stage is as short as possible, and among such cuts the sum of squares is the least. */
static void mt_cut_by_stage(int64_t *layers, const mt_cut_model *m) {
    int64_t stages = m->pp * m->vp, L = m->num_layers;
    double limit = mt_cut_limit(m) * (1 + 1e-9), *squares = mt_malloc((stages + 1) * (L + 1) * 8);
    int64_t *from = mt_calloc((stages + 1) * (L + 1) * 8);
    for (int64_t i = 0; i <= L; i++) squares[i] = i == 0 ? 0 : INFINITY;
    for (int64_t stage = 0; stage < stages; stage++)
        for (int64_t to = 0; to <= L; to++) {
            double *least = &squares[(stage + 1) * (L + 1) + to];
            *least = INFINITY;
            for (int64_t begin = to; begin >= 0; begin--) {
                double seconds = mt_stage_seconds(m, stage, begin, to);
                double sum = squares[stage * (L + 1) + begin] + seconds * seconds;
                if (seconds > limit) break;
                if (sum < *least) *least = sum, from[(stage + 1) * (L + 1) + to] = begin;
            }
        }
    for (int64_t stage = stages, to = L; stage > 0; stage--) {
        int64_t begin = from[stage * (L + 1) + to];
        layers[stage - 1] = to - begin, to = begin;
    }
    free(squares), free(from);
}

/* Seconds of a step of pp x `rounds` micro-batches. */
static double mt_cut_seconds(const int64_t *layers, const mt_cut_model *m, int64_t rounds) {
    int64_t stages = m->pp * m->vp, layer = 0;
    mt_schedule schedule = {m->vp > 1 ? MT_SCHEDULE_INTERLEAVED : MT_SCHEDULE_1F1B, m->pp, m->vp, rounds * m->pp,
                            m->pp};
    mt_action_costs *costs = mt_calloc(stages * (int64_t)sizeof *costs);
    for (int64_t stage = 0; stage < stages; layer += layers[stage++]) {
        double third = mt_stage_seconds(m, stage, layer, layer + layers[stage]) / 3;
        costs[stage % m->pp * m->vp + stage / m->pp] = (mt_action_costs){third, third, third, 0};
    }
    mt_timeline timeline;
    MT_CHECK(mt_timeline_create_uneven(&timeline, &schedule, costs, 0) == 0);
    double seconds = timeline.span;
    mt_timeline_free(&timeline);
    free(costs);
    return seconds;
}

/* Layers of each stage: equal ranks or equal stages, whichever makes the shorter step. */
static void mt_cut(int64_t *layers, const mt_options *o, int64_t pp, int64_t vp, const mt_layer_seconds *t) {
    int64_t L = o->num_layers, stages = pp * vp, of_replica = o->micro_batch_size * mt_max(o->data_parallel_size, 1);
    int64_t rounds = mt_min(mt_max(o->global_batch_size / mt_max(of_replica, 1) / pp, 1), 4);
    mt_cut_model m = {L, pp, vp, mt_malloc((L + 1) * 8), t->embedding, t->head};
    m.until[0] = 0;
    for (int64_t i = 0; i < L; i++) m.until[i + 1] = m.until[i] + (mt_layer_has_experts(o, i) ? t->sparse : t->dense);
    m.last += (m.until[L] - m.until[L - 1] + t->head) * (double)o->mtp_num_layers; // as the last layer, and the head
    mt_cut_by_rank(layers, &m);
    if (stages <= L) {
        int64_t *other = mt_calloc(stages * 8);
        mt_cut_by_stage(other, &m);
        if (mt_cut_seconds(other, &m, rounds) < 0.999 * mt_cut_seconds(layers, &m, rounds))
            memcpy(layers, other, (size_t)stages * 8);
        free(other);
    }
    free(m.until);
}

/* Balanced letters; `o`: finished for a pipeline of one rank. */
static char *mt_balanced_letters(const mt_options *o, int64_t ranks, int64_t pp, int64_t vp, const mt_machine *machine,
                                 mt_error *error) {
    mt_layer_seconds t;
    if (mt_layer_seconds_of(&t, o, ranks, machine, error) != 0) return NULL;
    int64_t stages = pp * vp, *layers = mt_calloc(stages * 8), length = 0;
    char *letters = mt_malloc(o->num_layers + o->mtp_num_layers + stages + 3);
    mt_cut(layers, o, pp, vp, &t);
    for (int64_t stage = 0; stage < stages; stage++) {
        if (stage == 0) letters[length++] = 'E';
        for (int64_t i = 0; i < layers[stage]; i++) letters[length++] = 't';
        if (stage + 1 < stages) letters[length++] = '|';
    }
    for (int64_t i = 0; i < o->mtp_num_layers; i++) letters[length++] = 'm';
    letters[length++] = 'L';
    letters[length] = 0;
    free(layers);
    return letters;
}

static char *mt_layout_balance(const mt_options *o, int64_t world_size, mt_error *error) {
    mt_options one = *o; // has no string of its own
    mt_machine machine;
    const char *text = o->pipeline_model_parallel_layout + strlen("auto");
    int64_t pp = o->pipeline_model_parallel_size, stages = 1;
    if (o->print_schedule && world_size == 1) // the ranks are imagined
        world_size = o->tensor_model_parallel_size * pp * o->context_parallel_size;
    if (*text && !(*text == '*' && mt_parse_int(text + 1, &stages) && stages >= 1 && stages <= o->num_layers)) {
        mt_error_set(error,
                     "--pipeline-model-parallel-layout %s: give auto, or auto*N for N stages a rank, at most one "
                     "for each layer",
                     o->pipeline_model_parallel_layout);
        return NULL;
    }
    if (pp == 1 || world_size % pp != 0) {
        mt_error_set(error,
                     "--pipeline-model-parallel-layout %s: needs a --pipeline-model-parallel-size that divides the "
                     "number of ranks, %lld, and is not 1",
                     o->pipeline_model_parallel_layout, (long long)world_size);
        return NULL;
    }
    one.pipeline_model_parallel_size = 1, one.pipeline_schedule = MT_SCHEDULE_1F1B, one.print_schedule = NULL;
    if (mt_options_derive(&one, MT_PROGRAM_TRAIN, world_size / pp, error) != 0) return NULL;
    if (mt_machine_read(&machine, o->gpu, error) != 0) return NULL;
    machine.gpus_per_host = o->gpus_per_host;
    return mt_balanced_letters(&one, world_size / pp, pp, stages, &machine, error);
}

int mt_train_options_finish(mt_options *options, int64_t world_size, mt_error *error) {
    mt_machine machine;
    bool imagines = options->plan || options->explain || options->print_schedule || options->print_config;
    if (options->gpus > 0 && !imagines)
        return mt_error_set(error,
                            "--gpus starts no ranks: it is for --plan and --explain; use mpirun -np %lld ./train",
                            (long long)options->gpus);
    if (MT_GIVEN(options, gpu) && mt_machine_read(&machine, options->gpu, error) != 0) return -1;
    return mt_options_finish_by(options, MT_PROGRAM_TRAIN, world_size, mt_layout_balance, error);
}

/* ---- the list of layouts */

enum { MT_SHARD_CHOICES = 2, MT_RECOMPUTE_CHOICES = 3 };

/* A layout. recompute: nothing, some modules, all. sharding: the optimizer (nothing on one rank), everything. */
typedef struct mt_candidate {
    int64_t tp, pp, cp, ep, vp, micro_batch;
    bool zero_bubble, balanced;
    int sharding, recompute;
    double bound, estimate; // seconds
} mt_candidate;

/* The facts of the model and the run that decide which layouts exist. */
typedef struct mt_search {
    mt_layouts *out;
    const mt_options *given;
    const mt_machine *machine;
    int argc;
    char **argv;
    double flops, parameters; // of a step; of the model
    int64_t batch;
    mt_candidate *list;
    int64_t count, room;
} mt_search;

/* Appends an option unless the user gave the field. */
#define MT_LINE(field, ...)                                                                                            \
    length += MT_GIVEN(o, field) ? 0 : snprintf(line + length, (size_t)(1024 - length), __VA_ARGS__)

static void mt_candidate_print(const mt_candidate *c, const mt_options *o, char line[1024]) {
    int length = 0;
    int64_t replicas = o->gpus / (c->tp * c->pp);
    *line = 0;
    MT_LINE(tensor_model_parallel_size, " --tensor-model-parallel-size %lld", (long long)c->tp);
    if (c->tp > 1) MT_LINE(sequence_parallel, " --sequence-parallel");
    if (c->tp > 1) MT_LINE(tp_comm_overlap, " --tp-comm-overlap");
    MT_LINE(pipeline_model_parallel_size, " --pipeline-model-parallel-size %lld", (long long)c->pp);
    if (c->balanced && c->vp > 1)
        MT_LINE(pipeline_model_parallel_layout, " --pipeline-model-parallel-layout auto*%lld", (long long)c->vp);
    else if (c->balanced)
        MT_LINE(pipeline_model_parallel_layout, " --pipeline-model-parallel-layout auto");
    else if (c->vp > 1)
        MT_LINE(num_virtual_stages_per_pipeline_rank, " --num-virtual-stages-per-pipeline-rank %lld", (long long)c->vp);
    if (c->zero_bubble) MT_LINE(pipeline_schedule, " --pipeline-schedule zb-h1");
    if (c->cp > 1) MT_LINE(context_parallel_size, " --context-parallel-size %lld", (long long)c->cp);
    if (o->num_experts > 0) MT_LINE(expert_model_parallel_size, " --expert-model-parallel-size %lld", (long long)c->ep);
    MT_LINE(micro_batch_size, " --micro-batch-size %lld", (long long)c->micro_batch);
    if (replicas > 1 && !MT_GIVEN(o, use_distributed_optimizer))
        MT_LINE(data_parallel_sharding_strategy, " --data-parallel-sharding-strategy %s",
                c->sharding ? "optim_grads_params" : "optim");
    if (replicas > 1) MT_LINE(overlap_grad_reduce, " --overlap-grad-reduce");
    if (replicas > 1) MT_LINE(overlap_param_gather, " --overlap-param-gather");
    if (c->recompute == 2)
        MT_LINE(recompute_granularity, " --recompute-granularity full");
    else if (c->recompute == 1)
        MT_LINE(recompute_granularity, " --recompute-granularity selective --recompute-modules layernorm %s",
                o->num_experts > 0 ? "moe_act" : "mlp");
}

/* The least time, and an estimate: products at their full rate, the pipeline's bubble, and rough exposed
 * communication. */
static void mt_candidate_rate(const mt_search *s, mt_candidate *c) {
    const mt_options *o = s->given;
    const mt_machine *m = s->machine;
    double gpus = (double)o->gpus, model = (double)(c->tp * c->pp), replicas = gpus / model;
    double rate = MT_GIVEN(o, fp8_format) ? m->fp8_product_tflops : m->bf16_product_tflops;
    double micro_batches = (double)s->batch / ((double)c->micro_batch * replicas / (double)c->cp);
    const double again_estimate[MT_RECOMPUTE_CHOICES] = {1, 1.12, 1.24}; // a layer's last product is not replayed
    double compute = s->flops / gpus / rate, stages = (double)c->pp;
    double bubble = (stages - 1) / (micro_batches * (double)c->vp) * (c->zero_bubble ? 0.3 : 1);
    double hosts = replicas > (double)m->gpus_per_host || c->tp * c->pp * c->cp > m->gpus_per_host;
    double link = hosts ? m->network_gbs : m->nvlink_gather_gbs;
    double tokens = (double)(c->micro_batch * o->seq_length) / (double)c->cp;
    double layers = (double)o->num_layers / stages;
    double tensor = 8 * layers * tokens * (double)o->hidden_size * 2 * (double)(c->tp - 1) / (double)c->tp;
    double shards = s->parameters / (model * (double)c->ep) * 6 * (replicas > 1) * (c->sharding ? micro_batches : 1);
    double keys = c->cp > 1 ? 6 * layers * tokens * (double)o->hidden_size * (double)(c->cp - 1) * 0.25 : 0;
    double rows = tokens / (double)c->tp * (double)mt_max(o->moe_router_topk, 1); // dispatched and combined, twice
    double exchange = 8 * layers * rows * (double)o->hidden_size * (double)(c->ep - 1) / (double)c->ep;
    exchange /= c->tp * c->ep > m->gpus_per_host ? m->network_gbs : m->nvlink_exchange_gbs;
    // a typical product of a layer, whose pieces beside communication are rows of one rank
    int64_t M = mt_max((int64_t)tokens / c->tp, 1), N = mt_max(4 * o->hidden_size / c->tp, 1), K = o->hidden_size;
    double whole = 2 * (double)M * (double)N * (double)K / m->bf16_product_tflops;
    double shape = mt_machine_product_seconds(m, M, N, K, 2 * (double)(M * N), false) / whole;
    c->bound = compute * (1 + 0.8 * bubble); // replays are few where the head is large
    c->estimate = compute * 1.15 * shape * again_estimate[c->recompute] * (1 + bubble) +
                  micro_batches * (0.4 * tensor / m->nvlink_copy_gbs + keys / link + exchange) + 0.3 * shards / link;
}

/* Adds a candidate and its variants of sharding and recomputation. */
static void mt_search_add(mt_search *s, mt_candidate c) {
    const mt_options *o = s->given;
    int64_t replicas = o->gpus / (c.tp * c.pp * c.cp);
    if (s->batch % (c.micro_batch * replicas) != 0) return;
    bool shards = replicas * c.cp > 1 && !c.zero_bubble && !MT_GIVEN(o, data_parallel_sharding_strategy) &&
                  !MT_GIVEN(o, use_distributed_optimizer);
    for (c.sharding = 0; c.sharding <= shards; c.sharding++)
        for (c.recompute = 0; c.recompute < (MT_GIVEN(o, recompute_granularity) ? 1 : MT_RECOMPUTE_CHOICES);
             c.recompute++) {
            // gradients fp32, weights bf16, and the sharded state: no plan is smaller
            double held = s->parameters / (double)(c.tp * c.pp * c.ep);
            double least = c.sharding ? held * 18 / (double)(replicas * c.cp) : held * 6;
            s->out->considered++;
            if (least > s->machine->memory_gib) {
                s->out->too_large++;
                continue;
            }
            mt_candidate_rate(s, &c);
            if (s->count == s->room)
                s->list = mt_realloc(s->list, (s->room = 2 * s->room + 256) * (int64_t)sizeof *s->list);
            s->list[s->count++] = c;
        }
}

/* True if the user decided on the stages of ranks. */
static bool mt_search_stages_given(const mt_options *o) {
    return MT_GIVEN(o, num_virtual_stages_per_pipeline_rank) || MT_GIVEN(o, pipeline_model_parallel_layout) ||
           MT_GIVEN(o, num_layers_per_virtual_pipeline_stage) || MT_GIVEN(o, pipeline_schedule) ||
           MT_GIVEN(o, decoder_first_pipeline_num_layers) || MT_GIVEN(o, decoder_last_pipeline_num_layers);
}

/* Schedules of a pipeline: one stage a rank, zero-bubble, or several stages, any number that divides the layers. 1, 2,
 * 4 and 8 are also balanced. */
static void mt_search_schedules(mt_search *s, mt_candidate c) {
    const mt_options *o = s->given;
    c.vp = 1;
    if (c.pp == 1 || mt_search_stages_given(o)) {
        mt_search_add(s, c);
        return;
    }
    for (c.vp = 1; c.vp * c.pp <= o->num_layers; c.vp++) {
        bool equal = o->num_layers % (c.pp * c.vp) == 0, balances = c.vp <= 8 && (c.vp & (c.vp - 1)) == 0;
        for (int balanced = !equal; balanced <= balances; balanced++) {
            c.balanced = balanced, c.zero_bubble = false;
            mt_search_add(s, c);
            c.zero_bubble = true;
            if (c.vp == 1) mt_search_add(s, c);
        }
    }
}

/* The next size of a dimension, or the given one only. */
static int64_t mt_next_size(int64_t size, bool is_given) {
    return is_given ? (int64_t)1 << 31 : size + 1; // more than any number of ranks
}

static void mt_search_list(mt_search *s) {
    const mt_options *o = s->given;
    mt_candidate c = {0};
    int64_t gpus = o->gpus;
    bool tp = MT_GIVEN(o, tensor_model_parallel_size), pp = MT_GIVEN(o, pipeline_model_parallel_size);
    bool cp = MT_GIVEN(o, context_parallel_size), mbs = MT_GIVEN(o, micro_batch_size);
    bool ep = MT_GIVEN(o, expert_model_parallel_size) || o->num_experts == 0;
    int64_t most = mt_min(o->gpus_per_host, gpus);
    for (c.tp = tp ? o->tensor_model_parallel_size : 1; c.tp <= (tp ? gpus : most); c.tp = mt_next_size(c.tp, tp))
        for (c.pp = pp ? o->pipeline_model_parallel_size : 1; c.tp * c.pp <= gpus && c.pp <= o->num_layers; c.pp++) {
            if (pp && c.pp != o->pipeline_model_parallel_size) break;
            for (c.cp = cp ? o->context_parallel_size : 1; c.tp * c.pp * c.cp <= gpus && c.cp <= (cp ? gpus : 16);
                 c.cp = mt_next_size(c.cp, cp)) {
                if (gpus % (c.tp * c.pp * c.cp) != 0 || (!cp && c.cp > 1 && o->seq_length / c.cp < 2048)) continue;
                for (c.ep = ep ? mt_max(o->expert_model_parallel_size, 1) : 1;
                     c.ep <= mt_max(o->num_experts, 1) && c.ep * c.pp <= gpus; c.ep = mt_next_size(c.ep, ep)) {
                    if (!ep && o->num_experts % c.ep != 0) continue;
                    for (c.micro_batch = mbs ? o->micro_batch_size : 1; c.micro_batch <= (mbs ? s->batch : 16);
                         c.micro_batch = mt_next_size(c.micro_batch, mbs))
                        mt_search_schedules(s, c);
                }
            }
        }
}

/* ---- the search */

void mt_options_assume_run(mt_options *o) {
    bool has_data = o->data_path.count > 0 || o->train_data_path.count > 0 || o->tokens_file;
    if (!has_data) o->mock_data = true;
    if (o->train_iters == 0 && o->train_samples == 0 && o->train_epochs == 0) o->train_iters = 1;
    if (o->lr == 0) o->lr = 1e-4;
}

/* Writes letters of a layout with repeats folded: E and t*5 within a stage, (t*4|)*3 for equal stages. */
static void mt_letters_fold(const char *letters, char *text, size_t room) {
    size_t length = 0;
    while (*letters && length + 64 < room) {
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

/* Replaces the layout "auto" of a line by its letters, so that the line does not depend on a machine's file. */
static void mt_line_expand(char line[1024], const char *letters) {
    char *at = strstr(line, " auto"), rest[1024], folded[512];
    if (!at || !letters) return;
    size_t length = 1 + strcspn(at + 1, " ");
    snprintf(rest, sizeof rest, "%s", at + length);
    mt_letters_fold(letters, folded, sizeof folded);
    snprintf(at, (size_t)(line + 1024 - at), " '%s'%s", folded, rest);
}

/* Parses the command line with a layout's options after it, and finishes them for all GPUs. */
static int mt_search_finish(const mt_search *s, const char *line, int64_t ranks, mt_options *o, mt_error *error) {
    char words[1024], *argv[512];
    int argc = 0;
    if (s->argc > 400) return mt_error_set(error, "--plan takes at most 400 words; put options into --config");
    for (; argc < s->argc; argc++) argv[argc] = s->argv[argc];
    snprintf(words, sizeof words, "%s", line);
    for (char *word = strtok(words, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    if (mt_options_parse(o, MT_PROGRAM_TRAIN, argc, argv, error) != 0) return -1;
    mt_options_assume_run(o);
    if (o->vocab_size == 0) o->vocab_size = s->given->vocab_size; // of the tokenizer
    return mt_train_options_finish(o, ranks, error);
}

static int mt_candidate_compare(const void *a, const void *b) {
    const mt_candidate *x = a, *y = b;
    if (x->estimate != y->estimate) return x->estimate > y->estimate ? 1 : -1;
    return (x > y) - (x < y);
}

/* Puts a simulated layout into its place among the best; frees the one that leaves. */
static void mt_layouts_insert(mt_layouts *out, mt_layout *layout) {
    int64_t at = out->count;
    for (int64_t i = 0; i < out->count; i++) // balanced stages may be the equal ones
        if (layout->simulation.seconds == out->best[i].simulation.seconds &&
            layout->simulation.needed == out->best[i].simulation.needed) {
            mt_simulation_free(&layout->simulation);
            return;
        }
    while (at > 0 && layout->simulation.seconds < out->best[at - 1].simulation.seconds) at--;
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

/* True if a layout that differs from this one in recomputing less, or sharding less, has room. */
static bool mt_candidate_has_better(const mt_candidate *c, const mt_candidate *fits, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        mt_candidate other = fits[i];
        if (other.recompute > c->recompute || other.sharding > c->sharding) continue;
        if (other.tp == c->tp && other.pp == c->pp && other.cp == c->cp && other.ep == c->ep && other.vp == c->vp &&
            other.micro_batch == c->micro_batch && other.zero_bubble == c->zero_bubble && other.balanced == c->balanced)
            return true;
    }
    return false;
}

/* Simulates a candidate; true if it has room. */
static bool mt_search_try(mt_search *s, const mt_candidate *c) {
    mt_layout layout;
    mt_options o;
    mt_candidate_print(c, s->given, layout.line);
    int status = mt_search_finish(s, layout.line, s->given->gpus, &o, &s->out->reason);
    if (status != 0) {
        s->out->illegal++;
    } else {
        status = mt_simulate(&layout.simulation, &o, o.gpus, s->machine, &s->out->reason);
        if (status == 0) s->out->simulated++;
        if (status == MT_DOES_NOT_FIT) s->out->too_large++;
        if (status == MT_SIMULATION_FAILED) s->out->illegal++;
        if (c->balanced) mt_line_expand(layout.line, o.pipeline_letters);
        if (status == 0)
            mt_layouts_insert(s->out, &layout);
        else
            mt_simulation_free(&layout.simulation);
    }
    mt_options_free(&o);
    return status == 0;
}

/* The model's counts, from its options finished for any number of ranks that they accept. */
static int mt_search_measure(mt_search *s, mt_error *error) {
    const mt_options *given = s->given;
    mt_options o;
    int64_t ranks = mt_max(given->tensor_model_parallel_size, 1) * mt_max(given->pipeline_model_parallel_size, 1) *
                    mt_max(given->context_parallel_size, 1);
    ranks *= mt_max(given->expert_model_parallel_size, 1);
    int status = mt_search_finish(s, "", ranks, &o, error);
    if (status != 0 && given->pipeline_model_parallel_size <= o.num_layers && !mt_search_stages_given(given)) {
        mt_error other; // stages of a size that does not divide the layers are balanced ones
        mt_options_free(&o);
        status = mt_search_finish(s, " --pipeline-model-parallel-layout auto", ranks, &o, &other);
    }
    if (status == 0) status = mt_simulate_check(&o, error);
    if (status == 0) {
        s->batch = o.global_batch_size;
        s->flops = mt_flops(&o, s->batch), s->parameters = (double)mt_num_parameters(&o);
    }
    mt_options_free(&o);
    return status;
}

int mt_layouts_search(mt_layouts *out, const mt_options *given, int argc, char **argv, const mt_machine *machine,
                      double seconds, mt_error *error) {
    double begin = mt_time();
    *out = (mt_layouts){.count = 0};
    mt_search s = {out, given, machine, argc, argv};
    if (given->global_batch_size == 0)
        return mt_error_set(error, "--plan needs --global-batch-size: another batch would be another run");
    if (given->role)
        return mt_error_set(error, "--plan does not take --role; give the options that --print-config shows");
    if (mt_search_measure(&s, error) != 0) return -1;
    mt_search_list(&s);
    if (s.count > 0) qsort(s.list, (size_t)s.count, sizeof *s.list, mt_candidate_compare);
    mt_candidate *fits = mt_malloc(mt_max(s.count, 1) * (int64_t)sizeof *fits);
    int64_t num_fits = 0;
    for (int64_t i = 0; i < s.count; i++) {
        const mt_candidate *c = &s.list[i];
        bool full = out->count == MT_BEST_LAYOUTS;
        if (full && c->bound > out->best[MT_BEST_LAYOUTS - 1].simulation.seconds)
            out->bounded++;
        else if (mt_candidate_has_better(c, fits, num_fits))
            out->bounded++;
        else if (mt_time() - begin > seconds)
            out->skipped++;
        else if (mt_search_try(&s, c))
            fits[num_fits++] = *c;
    }
    free(fits);
    free(s.list);
    if (out->count > 0) return 0;
    int64_t model = mt_max(given->tensor_model_parallel_size, 1) * mt_max(given->pipeline_model_parallel_size, 1) *
                    mt_max(given->context_parallel_size, 1);
    if (given->gpus % model != 0)
        return mt_error_set(
            error,
            "no layout of %lld GPUs is legal: the tensor, pipeline and context parallel sizes that are given "
            "need a multiple of %lld",
            (long long)given->gpus, (long long)model);
    if (out->considered == 0)
        return mt_error_set(error,
                            "no layout of %lld GPUs is legal: --global-batch-size %lld is not a multiple of "
                            "--micro-batch-size x data parallel size for any sizes; give another batch or other --gpus",
                            (long long)given->gpus, (long long)s.batch);
    if (out->illegal == out->considered)
        return mt_error_set(error, "no layout of %lld GPUs is legal; the last one: %.900s", (long long)given->gpus,
                            out->reason.text);
    return mt_error_set(error,
                        "no layout fits: %lld need more than %.1f GiB of a GPU and %lld are not legal; take more GPUs, "
                        "a smaller --global-batch-size or a smaller model",
                        (long long)out->too_large, machine->memory_gib / (1 << 30), (long long)out->illegal);
}

void mt_layouts_free(mt_layouts *out) {
    for (int64_t i = 0; i < out->count; i++) mt_simulation_free(&out->best[i].simulation);
    out->count = 0;
}
