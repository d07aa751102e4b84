/* generate.c: whole sequences from many prompts, on all data-parallel ranks. */
#include "generate.h"

#include "../tokens/prompts.h"

#include <stdlib.h>
#include <string.h>

/* Gives every rank of the group the tokens that `owner` generated. */
static void broadcast_sequence(mt_sequence *sequence, const mt_group *group, int owner) {
    int64_t numbers[] = {sequence->num_tokens, sequence->finish};
    mt_broadcast(group, numbers, sizeof numbers, owner);
    int64_t bytes = (numbers[0] - sequence->num_prompt) * 4;
    sequence->num_tokens = numbers[0], sequence->finish = (mt_finish)numbers[1];
    mt_broadcast(group, sequence->tokens + sequence->num_prompt, bytes, owner);
    if (!sequence->logps) return;
    mt_broadcast(group, sequence->logps, bytes, owner);
    mt_broadcast(group, sequence->sampled_logps, bytes, owner);
}

static bool prompts_equal(const mt_sequence *a, const mt_sequence *b) {
    if (a->num_inputs != b->num_inputs || a->images != b->images) return false;
    if (a->num_inputs > 0 && memcmp(a->inputs, b->inputs, (size_t)a->num_inputs * 4) != 0) return false;
    return a->num_prompt == b->num_prompt && memcmp(a->tokens, b->tokens, (size_t)a->num_prompt * 4) == 0;
}

int mt_sequences_generate(const mt_grid *grid, mt_generator *generator, mt_sequence *sequences, int64_t count,
                          bool (*is_stopped)(void), mt_error *error) {
    const mt_group *data = &grid->data;
    mt_sequence *own = mt_malloc(mt_max(count, 1) * (int64_t)sizeof *own);
    int *owner = mt_malloc(mt_max(count, 1) * (int64_t)sizeof *owner);
    int64_t prompts = 0, num_own = 0, left;
    double stopped = 0;
    for (int64_t i = 0; i < count; i++) { // samples of one prompt share pages, so they stay on one rank
        prompts += i > 0 && !prompts_equal(&sequences[i], &sequences[i - 1]);
        owner[i] = (int)(prompts % data->size);
        if (owner[i] == data->rank) own[num_own++] = sequences[i];
    }
    do {
        left = mt_generator_step(generator, own, num_own, error);
        if (is_stopped && left > 0) stopped = mt_generator_agree(generator, is_stopped());
    } while (left > 0 && stopped == 0);
    int status = mt_agree(&grid->world, left < 0, error);
    if (is_stopped && status == 0) mt_all_reduce_max(&grid->world, &stopped, 1, MT_F64);
    if (stopped > 0) status = MT_GENERATION_STOPPED;
    for (int64_t i = 0, k = 0; i < count && status == 0; i++) {
        if (owner[i] == data->rank) sequences[i] = own[k++];
        broadcast_sequence(&sequences[i], data, owner[i]);
    }
    free(own);
    free(owner);
    return status;
}

int mt_generate(mt_model *model, int32_t *tokens, int64_t *num_tokens, int64_t count, int64_t max_tokens,
                const mt_sampling *sampling, const mt_stops *stops, mt_error *error) {
    static const mt_sampling greedy = {.top_p = 1};
    static const mt_stops none = {.count = 0};
    const mt_model_plan *plan = mt_model_get_plan(model);
    if (count < 1 || plan->page_rows == 0 || max_tokens > plan->max_position)
        return mt_error_set(error,
                            "%lld sequences of %lld tokens do not fit the model's plan; create the model with "
                            "mt_generator_plan for this size",
                            (long long)count, (long long)max_tokens);
    mt_sequence *sequences = mt_calloc(count * (int64_t)sizeof *sequences);
    const mt_options *options = mt_model_options(model);
    int status = 0;
    for (int64_t s = 0; s < count && status == 0; s++)
        status = mt_sequence_begin(&sequences[s], s, tokens + s * max_tokens, num_tokens[s], max_tokens, max_tokens,
                                   options, error);
    if (status == 0) {
        mt_generator *generator = mt_generator_create(model, sampling ? sampling : &greedy, stops ? stops : &none);
        status = mt_sequences_generate(mt_model_grid(model), generator, sequences, count, NULL, error);
        mt_generator_destroy(generator);
    }
    for (int64_t s = 0; s < count; s++) {
        if (status == 0) memcpy(tokens + s * max_tokens, sequences[s].tokens, (size_t)sequences[s].num_tokens * 4);
        if (status == 0) num_tokens[s] = sequences[s].num_tokens;
        mt_sequence_end(&sequences[s]);
    }
    free(sequences);
    return status;
}

/* Begins all samples; none on an error, which numbers prompts from 1. */
static int begin_samples(mt_model *model, const mt_rollout *rollout, const int32_t *const *prompts,
                         const int64_t *num_tokens, int64_t count, mt_sequence *samples, mt_error *error) {
    int64_t each = rollout->num_return_sequences, context = mt_model_get_plan(model)->max_position;
    const mt_options *options = mt_model_options(model);
    for (int64_t i = 0; i < count * each; i++) {
        int status =
            mt_sequence_begin(&samples[i], i / each, prompts[i / each], num_tokens[i / each], context,
                              rollout->limits ? rollout->limits[i / each] : rollout->max_new_tokens, options, error);
        samples[i].id = rollout->ids ? rollout->ids[i] : rollout->first_id + i;
        if (rollout->images) samples[i].images = rollout->images[i / each];
        if (status == 0 && rollout->keeps_routes) {
            int64_t elements = mt_routes_size(options, samples[i].max_tokens);
            samples[i].routes = mt_malloc(elements * 4);
            for (int64_t j = 0; j < elements; j++) samples[i].routes[j] = -1;
        }
        if (status == 0) continue;
        while (i-- > 0) mt_sequence_end(&samples[i]);
        return -1;
    }
    return 0;
}

int mt_rollout_generate(mt_model *model, const mt_rollout *rollout, const int32_t *const *prompts,
                        const int64_t *num_tokens, int64_t count, mt_sequence *samples, mt_error *error) {
    int64_t num_samples = count * rollout->num_return_sequences;
    mt_sampling sampling = rollout->sampling;
    sampling.logprobs = true;
    if (mt_model_get_plan(model)->page_rows == 0)
        return mt_error_set(error, "the model has no key/value cache; add one to its plan with mt_plan_generation");
    if (begin_samples(model, rollout, prompts, num_tokens, count, samples, error) != 0) return -1;
    if (rollout->keeps_routes) mt_model_keep_routes(model);
    mt_generator *generator = mt_generator_create(model, &sampling, &rollout->stops);
    int status =
        mt_sequences_generate(mt_model_grid(model), generator, samples, num_samples, rollout->is_stopped, error);
    mt_generator_totals totals = mt_generator_read_totals(generator);
    double drafts[] = {(double)totals.drafted_tokens, (double)totals.accepted_tokens};
    if (status == 0 && rollout->drafts) {
        mt_all_reduce_sum(&mt_model_grid(model)->data, drafts, 2, MT_F64);
        for (int i = 0; i < 2; i++) rollout->drafts[i] += drafts[i];
    }
    mt_generator_destroy(generator);
    for (int64_t i = 0; i < num_samples && status != 0; i++) mt_sequence_end(&samples[i]);
    return status;
}

mt_model_plan mt_generator_plan(int64_t count, int64_t max_tokens, int64_t prompt_tokens) {
    mt_model_plan plan = {.max_tokens = mt_min(prompt_tokens, MT_PREFILL_TOKENS)};
    mt_plan_generation(&plan, count, max_tokens, 0);
    return plan;
}
