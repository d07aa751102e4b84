/* rollout_ranks.c: see rollout_ranks.h. All messages are broadcasts among all ranks, from the first one that trains or
 * from the first one that writes, in an order that both sides know: a command, what belongs to it, and after WRITE the
 * responses. */
#include "rollout_ranks.h"

#include "../base/watchdog.h"
#include "../models/generate.h"
#include "../models/model_role.h"
#include "../models/transfer.h"
#include "../tokens/prompts.h"
#include "../tokens/response.h"

#include <stdlib.h>
#include <string.h>

typedef enum command { OPEN, UPDATE, WRITE, END } command;

struct mt_rollout_ranks {
    mt_group all;
    int writer;            // the first rank of `all` that writes
    mt_transfer *transfer; // NULL: not opened
    int64_t count;         // responses under way; 0: none
};

/* The service on a rank that writes. */
typedef struct service {
    mt_rollout_ranks *ranks;
    const mt_run_options *options;
    const mt_tokenizer *tokenizer;
    mt_model_role role;
    mt_sampling sampling;
    mt_stops stops;
} service;

void mt_rollout_plan(mt_model_plan *plan, const mt_run_options *o) {
    int64_t prompts = mt_max(o->rollout_batch_size, o->over_sampling_batch_size);
    int64_t responses = mt_divide_up(prompts * o->num_return_sequences, o->stack.data_parallel_size);
    plan->page_rows = o->inference_dynamic_batching_block_size, plan->num_drafts = o->num_speculative_tokens;
    mt_plan_generation(plan, mt_min(responses, o->inference_max_requests), o->stack.seq_length, o->kv_cache_tokens);
}

int mt_rollout_ranks_split(mt_rollout_ranks **out, mt_grid *grid, const mt_run_options *o, bool *writes,
                           mt_error *error) {
    int64_t size = grid->world.size;
    if (o->rollout_ranks >= size)
        return mt_error_set(error, "--rollout-ranks %lld leaves no rank that trains, of %lld; start more by mpirun -np",
                            (long long)o->rollout_ranks, (long long)size);
    mt_rollout_ranks *ranks = *out = mt_calloc(sizeof *ranks);
    mt_grid_split(grid, &ranks->all, (int)o->rollout_ranks);
    ranks->writer = (int)(size - o->rollout_ranks);
    *writes = ranks->all.rank >= ranks->writer;
    return 0;
}

/* The number of a command, from the first rank to all. */
static void send_command(mt_rollout_ranks *ranks, command c) {
    int64_t number = c;
    mt_broadcast(&ranks->all, &number, sizeof number, 0);
}

/* The sampling and the stop tokens of the ranks that train, for all. */
static void share_sampling(mt_rollout_ranks *ranks, mt_sampling *sampling, mt_stops *stops) {
    mt_broadcast(&ranks->all, sampling, sizeof *sampling, 0);
    mt_broadcast(&ranks->all, stops, sizeof *stops, 0);
    stops->ends_text = NULL, stops->context = NULL;
}

/* ---- on the ranks that write */

/* The generator, with weights that it gets later. */
static int open_generator(service *s, const mt_grid *grid, mt_error *error) {
    const mt_run_options *o = s->options;
    mt_model_role *role = &s->role;
    mt_model_plan plan = {.max_tokens = mt_min(o->stack.seq_length, MT_PREFILL_TOKENS)};
    mt_model_role_sizes sizes = {.tensor = mt_max(o->rollout_tensor_model_parallel_size, 1),
                                 .pipeline = 1,
                                 .expert = o->rollout_expert_model_parallel_size,
                                 .context = 1,
                                 .whole = true};
    mt_model_role_begin(role, "generator", o, grid, NULL);
    role->rests = 0;
    int status = mt_model_role_place_apart(role, sizes, "--rollout-ranks", error);
    if (status == 0) mt_rollout_plan(&plan, &role->options);
    if (status == 0) status = mt_model_role_create(role, &plan, error);
    if (mt_agree(&s->ranks->all, status != 0, error) != 0) return -1;
    return mt_transfer_open_between(&s->ranks->transfer, role->model, NULL, &s->ranks->all, error);
}

/* Gives the ranks that train the responses. */
static void send_responses(service *s, mt_sequence *sequences, int64_t count) {
    const mt_group *all = &s->ranks->all;
    int64_t *sizes = mt_malloc(2 * count * 8);
    for (int64_t i = 0; i < count; i++)
        sizes[2 * i] = sequences[i].num_tokens - sequences[i].num_prompt, sizes[2 * i + 1] = sequences[i].finish;
    mt_broadcast(all, sizes, 2 * count * 8, s->ranks->writer);
    for (int64_t i = 0; i < count; i++) {
        mt_broadcast(all, sequences[i].tokens + sequences[i].num_prompt, sizes[2 * i] * 4, s->ranks->writer);
        mt_broadcast(all, sequences[i].logps, sizes[2 * i] * 4, s->ranks->writer);
        mt_sequence_end(&sequences[i]);
    }
    free(sizes);
}

static void write_responses(service *s) {
    const mt_run_options *o = s->options;
    const mt_group *all = &s->ranks->all;
    int64_t numbers[3], total = 0; // prompts, responses of each, first id
    mt_broadcast(all, numbers, sizeof numbers, 0);
    int64_t prompts = numbers[0], count = prompts * numbers[1], *lengths = mt_malloc(prompts * 8);
    mt_broadcast(all, lengths, prompts * 8, 0);
    for (int64_t i = 0; i < prompts; i++) total += lengths[i];
    int32_t *tokens = mt_malloc(total * 4), *at = tokens;
    const int32_t **texts = mt_malloc(prompts * (int64_t)sizeof *texts);
    mt_broadcast(all, tokens, total * 4, 0);
    for (int64_t i = 0; i < prompts; at += lengths[i++]) texts[i] = at;
    double results[4] = {0}, begin = mt_time(); // status, drafts, seconds
    mt_rollout rollout = {.num_return_sequences = numbers[1],
                          .max_new_tokens = o->max_new_tokens,
                          .first_id = numbers[2],
                          .sampling = s->sampling,
                          .stops = s->stops,
                          .drafts = results + 1};
    mt_responses responses = mt_responses_open(s->tokenizer, &o->stop, numbers[2], count);
    if (o->stop.count > 0) rollout.stops.ends_text = mt_responses_end, rollout.stops.context = &responses;
    mt_sequence *sequences = mt_calloc(count * (int64_t)sizeof *sequences);
    mt_error error;
    results[0] = mt_rollout_generate(s->role.model, &rollout, texts, lengths, prompts, sequences, &error);
    results[3] = mt_time() - begin;
    mt_responses_close(&responses);
    mt_broadcast(all, results, sizeof results, s->ranks->writer);
    if (results[0] != 0)
        mt_broadcast(all, error.text, sizeof error.text, s->ranks->writer);
    else
        send_responses(s, sequences, count);
    free(lengths), free(tokens), free(texts), free(sequences);
}

void mt_rollout_ranks_serve(mt_rollout_ranks *ranks, const mt_run_options *options, const mt_grid *grid,
                            const mt_tokenizer *tokenizer) {
    service s = {.ranks = ranks, .options = options, .tokenizer = tokenizer};
    int64_t number = OPEN;
    mt_error error; // the ranks that train have it, and end
    mt_cpu_batch_invariant(options->bitwise_rollouts);
    mt_watch_enter(MT_WATCH_STEP);
    while (number != END) {
        mt_broadcast(&ranks->all, &number, sizeof number, 0);
        if (number == OPEN) share_sampling(ranks, &s.sampling, &s.stops), (void)open_generator(&s, grid, &error);
        if (number == UPDATE) mt_transfer_run(ranks->transfer);
        if (number == WRITE) write_responses(&s);
    }
    mt_transfer_close(ranks->transfer);
    mt_model_role_close(&s.role);
    mt_group_free(&ranks->all);
    free(ranks);
}

/* ---- on the ranks that train */

int mt_rollout_ranks_open(mt_rollout_ranks *ranks, mt_model *actor, const mt_sampling *sampling, const mt_stops *stops,
                          mt_error *error) {
    mt_sampling own_sampling = *sampling;
    mt_stops own_stops = *stops;
    send_command(ranks, OPEN);
    share_sampling(ranks, &own_sampling, &own_stops);
    if (mt_agree(&ranks->all, false, error) != 0) return -1;
    return mt_transfer_open_between(&ranks->transfer, NULL, actor, &ranks->all, error);
}

void mt_rollout_ranks_update(mt_rollout_ranks *ranks) {
    MT_CHECK(ranks->count == 0);
    send_command(ranks, UPDATE);
    mt_transfer_run(ranks->transfer);
}

void mt_rollout_ranks_write(mt_rollout_ranks *ranks, const mt_rollout_request *request) {
    int64_t numbers[] = {request->count, request->each, request->first_id}, total = 0;
    int64_t *lengths = mt_malloc(request->count * 8);
    MT_CHECK(ranks->count == 0);
    memcpy(lengths, request->lengths, (size_t)request->count * 8);
    for (int64_t i = 0; i < request->count; i++) total += lengths[i];
    int32_t *tokens = mt_malloc(total * 4), *at = tokens;
    for (int64_t i = 0; i < request->count; at += lengths[i++]) memcpy(at, request->prompts[i], (size_t)lengths[i] * 4);
    send_command(ranks, WRITE);
    mt_broadcast(&ranks->all, numbers, sizeof numbers, 0);
    mt_broadcast(&ranks->all, lengths, request->count * 8, 0);
    mt_broadcast(&ranks->all, tokens, total * 4, 0);
    ranks->count = request->count * request->each;
    free(lengths), free(tokens);
}

int mt_rollout_ranks_collect(mt_rollout_ranks *ranks, mt_sequence *sequences, double *drafts, double *seconds,
                             mt_error *error) {
    int64_t count = ranks->count;
    double results[4];
    MT_CHECK(count > 0);
    mt_broadcast(&ranks->all, results, sizeof results, ranks->writer);
    ranks->count = 0;
    drafts[0] += results[1], drafts[1] += results[2], *seconds += results[3];
    if (results[0] != 0) {
        mt_broadcast(&ranks->all, error->text, sizeof error->text, ranks->writer);
        return -1;
    }
    int64_t *sizes = mt_malloc(2 * count * 8);
    mt_broadcast(&ranks->all, sizes, 2 * count * 8, ranks->writer);
    for (int64_t i = 0; i < count; i++) {
        mt_sequence *q = &sequences[i];
        *q = (mt_sequence){.slot = -1, .num_tokens = sizes[2 * i], .finish = (mt_finish)sizes[2 * i + 1]};
        q->tokens = mt_malloc(q->num_tokens * 4), q->logps = mt_malloc(q->num_tokens * 4);
        mt_broadcast(&ranks->all, q->tokens, q->num_tokens * 4, ranks->writer);
        mt_broadcast(&ranks->all, q->logps, q->num_tokens * 4, ranks->writer);
    }
    free(sizes);
    return 0;
}

void mt_rollout_ranks_close(mt_rollout_ranks *ranks) {
    if (!ranks) return;
    int64_t count = ranks->count;
    if (count > 0) {
        mt_sequence *sequences = mt_calloc(count * (int64_t)sizeof *sequences);
        double drafts[2] = {0}, seconds = 0;
        mt_error ignored;
        (void)mt_rollout_ranks_collect(ranks, sequences, drafts, &seconds, &ignored);
        for (int64_t i = 0; i < count; i++) mt_sequence_end(&sequences[i]);
        free(sequences);
    }
    mt_transfer_close(ranks->transfer);
    send_command(ranks, END);
    mt_group_free(&ranks->all);
    free(ranks);
}
