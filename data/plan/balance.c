/* balance.c: times of layers, from simulations of models of one and two layers, stages of equal time, and moves of
 * layers that make a simulated step shorter. */
#include "balance.h"

#include "../options/option_rules.h"
#include "../options/option_table.h"
#include "../options/options.h"
#include "../checkpoint/run_options.h"
#include "../report/timeline.h"
#include "simulate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- seconds of layers */

/* Seconds of a micro-batch in a model of few layers, and bytes. phase, products: of forward and backward, the least of
 * the simulated micro-batches; products: the part of a phase that matrix products and attention take. */
typedef struct mt_few_seconds {
    double mean, embedding, phase[2], products[2], states, activations;
} mt_few_seconds;

/* From the calls and phases of the simulation that ended last, of `micro_batches`. */
static void mt_few_seconds_add(mt_few_seconds *few, int64_t micro_batches) {
    int64_t num_calls, num_phases;
    const mt_simulated_call *calls = mt_simulated_calls(&num_calls);
    const mt_profile_phase *phases = mt_simulated_phases(&num_phases);
    double *products = mt_calloc(mt_max(num_phases, 1) * 8);
    for (const mt_simulated_call *call = calls; call < calls + num_calls; call++) {
        mt_operation operation = call->operation;
        if (operation == MT_OPERATION_embedding_forward || operation == MT_OPERATION_embedding_backward)
            few->embedding += (call->to - call->from) / (double)micro_batches;
        if (call->phase >= 0 && call->stream == 0 && call->work.flops > 0)
            products[call->phase] += call->to - call->from;
    }
    few->phase[0] = few->phase[1] = few->products[0] = few->products[1] = INFINITY;
    for (int64_t i = 0; i < num_phases; i++) {
        bool backward = strcmp(phases[i].name, "backward") == 0;
        if (!backward && strcmp(phases[i].name, "forward") != 0) continue;
        few->phase[backward] = fmin(few->phase[backward], phases[i].to - phases[i].from);
        few->products[backward] = fmin(few->products[backward], products[i]);
    }
    free(products);
}

int mt_layer_cost(const mt_options *o, int64_t layer) {
    mt_layer_kind kind = mt_layer_kind_of(o, layer);
    bool has_states = kind.mixer != MT_MIXER_NONE && !mt_mixer_attends(kind.mixer);
    bool of_decoder = o->decoder_num_layers > 0 && !kind.of_encoder;
    int halves = kind.feed_forward == MT_FEED_FORWARD_NONE ? 1 : kind.mixer == MT_MIXER_NONE ? 2 : 0;
    return mt_layer_has_experts(o, layer) + 2 * (kind.window > 0) + 4 * has_states + 8 * halves +
           24 * (kind.shares_indices || of_decoder);
}

/* Two layers as one of a list of letters; NULL without the list. */
static char *mt_two_layers(char letters[3], const char *list, int64_t like) {
    if (!list) return NULL;
    letters[0] = letters[1] = list[like], letters[2] = 0;
    return letters;
}

/* Counts the bytes of a model of `count` layers that are like layer `like`, and simulates its step of `micro_batches`.
 * Returns 0; -1 with error; or MT_DOES_NOT_FIT, with bytes only, if no layer of such micro-batches has room. */
static int mt_few_simulate(mt_few_seconds *few, const mt_options *o, int64_t ranks, int64_t count, int64_t like,
                           int64_t micro_batches, const mt_machine *machine, mt_error *error) {
    mt_options model = *o; // its strings are not freed
    mt_simulation simulation;
    char experts[3], windows[3], linears[3], hybrids[3];
    model.num_layers = count, model.pipeline_letters = NULL, model.mtp_num_layers = 0;
    model.bf16 = true, model.stage = MT_STAGE_PT, model.optimizer_cpu_offload = model.dynamic_context_parallel = false;
    model.global_batch_size = micro_batches * o->micro_batch_size * o->data_parallel_size;
    model.decoder_first_pipeline_num_layers = model.decoder_last_pipeline_num_layers = 0;
    model.moe_layers = mt_two_layers(experts, o->moe_layers, like);
    model.window_layers = mt_two_layers(windows, o->window_layers, like);
    model.linear_layers = mt_two_layers(linears, o->linear_layers, like);
    model.hybrid_layers = mt_two_layers(hybrids, o->hybrid_layers, like);
    model.rope_layers = NULL;
    // The second of two layers shares the keys of the first, or none does.
    model.dsa_indexer_topk_freq = mt_layer_kind_of(o, like).shares_indices ? 2 : 1,
    model.dsa_indexer_skip_topk_offset = 0;
    mt_machine other = *machine;
    other.memory_gib = 0; // counts only: a batch of millions of tokens takes long to simulate
    int status = mt_simulate(&simulation, &model, ranks, &other, error);
    *few = (mt_few_seconds){0};
    few->states = (double)(simulation.bytes[MT_PLAN_WEIGHTS] + simulation.bytes[MT_PLAN_GRADIENTS]);
    few->activations = (double)(simulation.bytes[MT_PLAN_ACTIVATIONS] + simulation.bytes[MT_PLAN_EXPERTS]);
    mt_simulation_free(&simulation);
    if (status != MT_DOES_NOT_FIT || few->activations / 2 > machine->memory_gib) return status;
    other.memory_gib = INFINITY; // the layers of the whole model are cut elsewhere
    status = mt_simulate(&simulation, &model, ranks, &other, error);
    if (status == 0) {
        few->mean = simulation.pipeline[0].forward[0] + simulation.pipeline[0].backward[0];
        mt_few_seconds_add(few, micro_batches);
    }
    mt_simulation_free(&simulation);
    return status;
}

/* A layer takes the difference of two layers and one, for each kind of layer that the model has; the rest is not in
 * layers. */
int mt_layer_seconds_of(mt_layer_seconds *t, const mt_options *o, int64_t ranks, int64_t micro_batches,
                        const mt_machine *machine, mt_error *error) {
    int64_t layers[MT_LAYER_COSTS]; // one of each cost; -1: none
    mt_machine roomy = *machine;
    roomy.memory_gib = INFINITY;
    *t = (mt_layer_seconds){.embedding = 0};
    for (int cost = 0; cost < MT_LAYER_COSTS; cost++) layers[cost] = -1;
    for (int64_t i = 0; i < o->num_layers; i++) layers[mt_layer_cost(o, i)] = i;
    for (int cost = MT_LAYER_COSTS - 1; cost >= 0; cost--) { // the rest: of layers without experts, if there are such
        mt_few_seconds one, two;
        if (layers[cost] < 0) continue;
        int status = mt_few_simulate(&one, o, ranks, 1, layers[cost], micro_batches, machine, error);
        if (status == 0) status = mt_few_simulate(&two, o, ranks, 2, layers[cost], micro_batches, &roomy, error);
        if (status == MT_DOES_NOT_FIT) *t = (mt_layer_seconds){.activations = one.activations, .single = cost};
        if (status != 0) return status == MT_DOES_NOT_FIT ? 0 : -1;
        t->layer[cost] = two.mean - one.mean, t->embedding = two.embedding;
        t->head = fmax(2 * one.mean - two.mean - two.embedding, 0);
        t->states[cost] = two.states - one.states, t->saved[cost] = two.activations - one.activations;
        t->activations = one.activations, t->single = cost;
        t->least_rest = t->least_head = 0;
        for (int backward = 0; backward < 2; backward++) {
            t->least[cost][backward] = two.phase[backward] - one.phase[backward];
            t->least_rest += fmax(2 * one.phase[backward] - two.phase[backward], 0);
            t->least_head += fmax(2 * one.products[backward] - two.products[backward], 0);
        }
    }
    return 0;
}

/* Of an encoder-decoder: multiplications for a token of the decoder in place of seconds. */
static mt_layer_seconds mt_layer_work_of(const mt_options *o) {
    mt_layer_seconds t = {.head = (double)o->hidden_size * (double)o->padded_vocab_size};
    for (int64_t i = 0; i < o->num_layers; i++) t.layer[mt_layer_cost(o, i)] = mt_layer_multiplications(o, i);
    return t;
}

/* ---- cuts */

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
    for (int64_t i = 0; i < L; i++) m.until[i + 1] = m.until[i] + t->layer[mt_layer_cost(o, i)];
    double module = m.until[L] - m.until[L - 1]; // as the last layer, or as layers with its halves
    for (const char *letter = o->mtp_hybrid_layers; letter && *letter; letter++) {
        const char *like = strchr(o->hybrid_layers, *letter);
        module = (letter == o->mtp_hybrid_layers ? 0 : module) +
                 (like ? t->layer[mt_layer_cost(o, like - o->hybrid_layers)] : 0);
    }
    m.last += (module + t->head) * (double)o->mtp_num_layers;
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

/* The letters of stages of so many layers each, to free. */
static char *mt_cut_letters(const mt_options *o, const int64_t *layers, int64_t stages) {
    char *letters = mt_malloc(o->num_layers + o->mtp_num_layers + stages + 3);
    int64_t length = 0;
    for (int64_t stage = 0; stage < stages; stage++) {
        if (stage == 0) letters[length++] = 'E';
        for (int64_t i = 0; i < layers[stage]; i++) letters[length++] = 't';
        if (stage + 1 < stages) letters[length++] = '|';
    }
    for (int64_t i = 0; i < o->mtp_num_layers; i++) letters[length++] = 'm';
    letters[length++] = 'L';
    letters[length] = 0;
    return letters;
}

char *mt_balanced_letters(const mt_options *o, int64_t pp, int64_t vp, const mt_layer_seconds *t) {
    int64_t *layers = mt_calloc(pp * vp * 8);
    mt_cut(layers, o, pp, vp, t);
    char *letters = mt_cut_letters(o, layers, pp * vp);
    free(layers);
    return letters;
}

/* ---- moves of layers */

/* Simulates a step with these stages. Returns its seconds, INFINITY if it does not fit or is not legal; *slowest: the
 * pipeline rank that ends last; *needed: bytes of a GPU. */
static double mt_cut_simulate(const int64_t *layers, int64_t stages, const mt_run_options *o, int64_t world_size,
                              const mt_machine *machine, int64_t *slowest, double *needed) {
    mt_run_options model = *o; // its strings are not freed
    mt_simulation simulation = {0};
    mt_error unused;
    char *letters = mt_cut_letters(&o->stack, layers, stages);
    model.stack.pipeline_letters = letters, model.pipeline_model_parallel_layout = NULL, model.print_schedule = NULL;
    model.stack.bf16 = true, model.stack.stage = MT_STAGE_PT, model.stack.dynamic_context_parallel = false;
    double seconds = INFINITY;
    if (mt_options_derive(&model, MT_PROGRAM_TRAIN, world_size, &unused) == 0 &&
        mt_simulate(&simulation, &model.stack, world_size, machine, &unused) == 0)
        seconds = simulation.seconds, *slowest = simulation.pipeline[simulation.slowest].last;
    *needed = simulation.needed;
    mt_simulation_free(&simulation);
    free(letters);
    return seconds;
}

enum { MT_MOST_SIMULATIONS = 250 }; // with 256 GPUs and Llama 3 70B they take 6 s

/* Moves single layers from stage to stage as long as the simulated step gets shorter. The first moves tried are those
 * away from the rank that ends last. Memory: that of the machine, or, where the GPU is not given or the model is not in
 * bf16, what the step needs before. */
static void mt_cut_move(int64_t *layers, int64_t vp, const mt_run_options *o, int64_t world_size, mt_machine machine) {
    int64_t stages = o->stack.pipeline_model_parallel_size * vp, simulations = 0, slowest = 0, ignored;
    bool is_known = MT_GIVEN(o, gpu) && o->stack.bf16;
    double needed, unused;
    if (!is_known) machine.memory_gib = 1e30; // finite, so that bytes are counted
    double shortest = mt_cut_simulate(layers, stages, o, world_size, &machine, &slowest, &needed);
    if (!is_known) machine.memory_gib = needed;
    for (bool moved = true; moved;) {
        moved = false;
        for (int64_t pair = 0; pair < stages * stages && simulations < MT_MOST_SIMULATIONS; pair++) {
            int64_t from = (slowest + pair / stages) % stages, to = pair % stages;
            if (from == to || layers[from] < 2) continue;
            layers[from]--, layers[to]++, simulations++;
            double seconds = mt_cut_simulate(layers, stages, o, world_size, &machine, &ignored, &unused);
            if (seconds < 0.9999 * shortest)
                shortest = seconds, moved = true;
            else
                layers[from]++, layers[to]--;
        }
    }
}

/* ---- --pipeline-model-parallel-layout auto */

static char *mt_layout_balance(const mt_run_options *o, int64_t world_size, mt_error *error) {
    mt_run_options one = *o; // has no string of its own
    mt_machine machine;
    const char *text = o->pipeline_model_parallel_layout + strlen("auto");
    int64_t pp = o->stack.pipeline_model_parallel_size, stages = 1;
    if (o->print_schedule && world_size == 1) // the ranks are imagined
        world_size = o->stack.tensor_model_parallel_size * pp * o->stack.context_parallel_size;
    if (*text && !(*text == '*' && mt_parse_int(text + 1, &stages) && stages >= 1 && stages <= o->stack.num_layers)) {
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
    one.stack.pipeline_model_parallel_size = 1, one.stack.pipeline_schedule = MT_SCHEDULE_1F1B,
    one.print_schedule = NULL;
    if (mt_options_derive(&one, MT_PROGRAM_TRAIN, world_size / pp, error) != 0) return NULL;
    if (mt_machine_of_options(&machine, o, error) != 0) return NULL;
    mt_machine roomy = machine;
    roomy.memory_gib = INFINITY;
    mt_layer_seconds t;
    bool simulates = one.stack.decoder_num_layers == 0;
    if (!simulates) t = mt_layer_work_of(&one.stack);
    if (simulates && mt_layer_seconds_of(&t, &one.stack, world_size / pp, 1, &roomy, error) != 0) return NULL;
    int64_t *layers = mt_calloc(pp * stages * 8);
    mt_cut(layers, &one.stack, pp, stages, &t);
    if (simulates) mt_cut_move(layers, stages, o, world_size, machine);
    char *letters = mt_cut_letters(&o->stack, layers, pp * stages);
    free(layers);
    return letters;
}

int mt_train_options_finish(mt_run_options *options, int64_t world_size, mt_error *error) {
    mt_machine machine;
    bool imagines = options->plan || options->explain || options->print_schedule || options->print_config;
    if (options->gpus > 0 && !imagines)
        return mt_error_set(error,
                            "--gpus starts no ranks: it is for --plan and --explain; use mpirun -np %lld ./train",
                            (long long)options->gpus);
    if (MT_GIVEN(options, gpu) && mt_machine_read(&machine, options->gpu, error) != 0) return -1;
    return mt_options_finish_by(options, MT_PROGRAM_TRAIN, world_size, mt_layout_balance, error);
}
