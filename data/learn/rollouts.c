/* rollouts.c: prompts, responses and scores of a step -> advantages and micro-batches. */
#include "rollouts.h"

#include "../tokens/response.h"
#include "../tokens/tokenizer_vocab.h"
#include "../datasets/random_order.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- prompts and responses -------------------------------------------------------------------------------------- */

/* A permutation of count items, drawn from a key. */
static uint32_t *draw_order(int64_t count, uint64_t key) {
    uint32_t *order = mt_malloc(count * 4);
    mt_mt19937 random;
    MT_CHECK(count < UINT32_MAX);
    for (int64_t i = 0; i < count; i++) order[i] = (uint32_t)i;
    mt_mt19937_seed(&random, (uint32_t)key);
    mt_numpy_shuffle(&random, order, count);
    return order;
}

void mt_prompts_order(int64_t num_prompts, bool shuffles, int64_t seed, int64_t first, int64_t count, int64_t *order) {
    uint32_t *epoch_order = NULL;
    for (int64_t i = 0; i < count; i++) {
        int64_t epoch = (first + i) / num_prompts, at = (first + i) % num_prompts;
        if (shuffles && (!epoch_order || at == 0)) {
            free(epoch_order);
            epoch_order = draw_order(num_prompts, mt_random_key((uint64_t)seed, UINT64_C(0x70726f6d707473), // "prompts"
                                                                (uint64_t)epoch));
        }
        order[i] = shuffles ? epoch_order[at] : at;
    }
    free(epoch_order);
}

int mt_prompt_quotas(int64_t *quotas, const mt_strings *shares, int64_t batch, mt_error *error) {
    int64_t left = batch;
    for (int64_t i = 0; i < shares->count; i++) {
        const char *word = shares->items[i], *equals = strrchr(word, '=');
        char *end = NULL;
        double share = equals ? strtod(equals + 1, &end) : 0;
        if (!equals || equals == word || end == equals + 1 || *end || !(share > 0 && share <= 1))
            return mt_error_set(error, "--prompt-shares expects words such as math,aime=0.4, got '%.200s'", word);
        bool is_last = i == shares->count - 1;
        left -= quotas[i] = is_last ? left : (int64_t)(share * (double)batch + 1e-9);
        if (quotas[i] < 1 || left < 0)
            return mt_error_set(error,
                                "--prompt-shares: %.200s leaves no prompt for a share in --rollout-batch-size %lld; "
                                "raise that, or the share",
                                word, (long long)batch);
    }
    return 0;
}

void mt_prompts_order_shares(const mt_samples *prompts, const int64_t *quotas, int64_t num_shares, bool shuffles,
                             int64_t seed, int64_t first, int64_t count, int64_t *order) {
    int64_t batch = 0, begin = 0, *own = mt_malloc(prompts->count * 8);
    for (int64_t i = 0; i < num_shares; i++) batch += quotas[i];
    for (int64_t share = 0; share < num_shares; begin += quotas[share++]) {
        int64_t have = 0;
        for (int64_t i = 0; i < prompts->count; i++)
            if (prompts->questions[i].share == share) own[have++] = i;
        for (int64_t i = 0; i < count; i++) {
            int64_t at = (first + i) % batch - begin;
            if (at < 0 || at >= quotas[share]) continue;
            int64_t position = (first + i) / batch * quotas[share] + at, drawn;
            mt_prompts_order(have, shuffles, seed + share, position, 1, &drawn);
            order[i] = own[drawn];
        }
    }
    free(own);
}

void mt_rollouts_begin(mt_rollouts *r, const mt_samples *prompts, const int64_t *order, int64_t num_prompts,
                       int64_t group_size) {
    *r = (mt_rollouts){.prompts = prompts, .group_size = group_size};
    mt_rollouts_extend(r, order, num_prompts);
}

/* array[count, each] with further elements of 0. */
static void *extend(void *array, int64_t count, int64_t more, size_t each) {
    char *extended = mt_realloc(array, (count + more) * (int64_t)each);
    memset(extended + (size_t)count * each, 0, (size_t)more * each);
    return extended;
}

void mt_rollouts_extend(mt_rollouts *r, const int64_t *order, int64_t num_prompts) {
    int64_t count = r->count, more = num_prompts * r->group_size;
    r->prompt_of = extend(r->prompt_of, count, more, sizeof *r->prompt_of);
    r->responses = extend(r->responses, count, more, sizeof *r->responses);
    r->response_tokens = extend(r->response_tokens, count, more, sizeof *r->response_tokens);
    r->overlong = extend(r->overlong, count, more, sizeof *r->overlong);
    r->scores = extend(r->scores, count, more, sizeof *r->scores);
    r->routes = extend(r->routes, count, more, sizeof *r->routes);
    r->turns = extend(r->turns, count, more, sizeof *r->turns);
    r->num_prompts += num_prompts, r->count += more;
    for (int64_t s = 0; s < more; s++) r->prompt_of[count + s] = order[s / r->group_size];
}

/* Frees the sequences of mt_rollouts_select. */
static void free_sequences(mt_rollouts *r) {
    mt_samples_free(&r->samples);
    free(r->response_of), free(r->groups), free(r->rewards), free(r->baselines), free(r->spans), free(r->mask);
    free(r->token_rewards), free(r->squares);
    for (int i = 0; i < MT_NUM_LOSS_INPUTS; i++) free(r->inputs[i]);
    r->T = 0;
}

void mt_rollouts_free(mt_rollouts *r) {
    for (int64_t s = 0; s < r->count; s++) free(r->responses[s]), free(r->routes[s]), free(r->turns[s].is_written);
    for (int i = 0; i < MT_MAX_INTS; i++) free(r->parts[i]);
    free(r->routes), free(r->turns), free(r->prompt_of), free(r->responses), free(r->response_tokens),
        free(r->overlong), free(r->scores);
    free_sequences(r);
    *r = (mt_rollouts){0};
}

void mt_rollouts_set(mt_rollouts *r, int64_t s, const int32_t *tokens, int64_t count, bool overlong) {
    MT_CHECK(s >= 0 && s < r->count && !r->responses[s] && count >= 1);
    r->responses[s] = mt_malloc(count * 4);
    memcpy(r->responses[s], tokens, (size_t)count * 4);
    r->response_tokens[s] = count, r->overlong[s] = overlong;
}

void mt_rollouts_set_turns(mt_rollouts *r, int64_t s, mt_turns turns) {
    MT_CHECK(r->responses[s] && turns.last < r->response_tokens[s]);
    r->turns[s] = turns;
}

void mt_rollouts_score_turns(mt_rollouts *r, int64_t first) {
    for (int64_t s = first; s < r->count; s++) r->scores[s] = r->turns[s].reward;
}

/* Appends the text of response s, or of its last turn, up to a stop string, as infer writes it: a token without a text,
 * such as one of the rows that pad a model's vocabulary, is U+FFFD. */
static void append_text(const mt_rollouts *r, int64_t s, const mt_tokenizer *tokenizer, const mt_strings *stops,
                        mt_text *text) {
    int64_t first = text->bytes;
    mt_error ignored;
    mt_decoder *decoder = mt_decoder_open(tokenizer);
    for (int64_t i = r->turns[s].last; i < r->response_tokens[s]; i++) {
        int32_t token = r->responses[s][i];
        if (mt_tokenizer_is_special(tokenizer, token)) continue;
        if (mt_decode_next(decoder, token, text, &ignored) != 0) mt_text_append(text, "\xEF\xBF\xBD", 3);
    }
    mt_decode_end(decoder, text);
    mt_decoder_close(decoder);
    int64_t stop = mt_stop_find(text->data, first, text->bytes, stops);
    if (stop >= 0) text->bytes = stop;
}

int mt_rollouts_score(mt_rollouts *r, int64_t first, mt_reward_function *reward, const mt_tokenizer *tokenizer,
                      const mt_strings *stops, mt_error *error) {
    int64_t count = r->count - first, *offsets = mt_calloc((count + 1) * 8);
    mt_reward_item *items = mt_calloc(count * (int64_t)sizeof *items);
    mt_text text = {0};
    for (int64_t i = 0; i < count; i++) {
        append_text(r, first + i, tokenizer, stops, &text);
        offsets[i + 1] = text.bytes;
    }
    for (int64_t i = 0; i < count; i++) {
        const mt_question *question = &r->prompts->questions[r->prompt_of[first + i]];
        items[i] = (mt_reward_item){.prompt = question->prompt,
                                    .response = text.bytes > 0 ? text.data + offsets[i] : "",
                                    .answer = question->answer,
                                    .prompt_bytes = question->prompt_bytes,
                                    .response_bytes = offsets[i + 1] - offsets[i],
                                    .answer_bytes = question->answer_bytes};
    }
    int status = mt_rewards_compute(reward, items, count, r->scores + first, error);
    free(items), free(offsets), free(text.data);
    return status;
}

void mt_rollouts_keep_part(mt_rollouts *r, int64_t first, int64_t part) {
    r->parts[part] = mt_realloc(r->parts[part], r->count * 8);
    memcpy(r->parts[part] + first, r->scores + first, (size_t)(r->count - first) * 8);
}

void mt_rollouts_add_parts(mt_rollouts *r, int64_t first, const mt_reals *weights) {
    for (int64_t s = first; s < r->count; s++) {
        r->scores[s] = 0;
        for (int64_t i = 0; i < weights->count; i++) r->scores[s] += weights->items[i] * r->parts[i][s];
    }
}

/* ---- sequences -------------------------------------------------------------------------------------------------- */

static bool normalises(const mt_rollout_config *c) {
    return c->norm_mean != MT_REWARD_NORM_NONE || c->norm_std != MT_REWARD_NORM_NONE;
}

/* The reward of response s. */
static double reward_of(const mt_rollouts *r, const mt_rollout_config *c, int64_t s) {
    double reward = r->scores[s], excess = (double)(r->response_tokens[s] - c->max_new_tokens + c->overlong_buffer);
    double share = c->overlong_buffer > 0 ? excess / (double)c->overlong_buffer : 0;
    if (r->overlong[s]) share = 1;
    if (c->overlong == MT_OVERLONG_PENALTY) reward -= c->overlong_penalty * mt_bounded(share, 0, 1);
    bool clips = c->reward_clip > 0 && !normalises(c); // else after that
    return clips ? mt_bounded(reward, -c->reward_clip, c->reward_clip) : reward;
}

/* Normalises the rewards of the sequences that remain, over all of them or over their groups, and clips them. */
static void normalise_rewards(mt_rollouts *r, const mt_rollout_config *c) {
    int64_t count = r->samples.count, sets = 1 + r->num_prompts; // the batch, and each group
    double *numbers = mt_calloc(3 * sets * 8), *means = numbers + sets, *squares = means + sets, clip = c->reward_clip;
    for (int64_t k = 0; k < count; k++) {
        int64_t group = 1 + r->groups[k];
        numbers[0] += 1, means[0] += r->rewards[k];
        numbers[group] += 1, means[group] += r->rewards[k];
    }
    for (int64_t i = 0; i < sets; i++) means[i] /= mt_maximum(numbers[i], 1);
    for (int64_t k = 0; k < count; k++) {
        int64_t group = 1 + r->groups[k];
        squares[0] += (r->rewards[k] - means[0]) * (r->rewards[k] - means[0]);
        squares[group] += (r->rewards[k] - means[group]) * (r->rewards[k] - means[group]);
    }
    for (int64_t k = 0; k < count; k++) {
        int64_t of_mean = c->norm_mean == MT_REWARD_NORM_GROUP ? 1 + r->groups[k] : 0;
        int64_t of_std = c->norm_std == MT_REWARD_NORM_GROUP ? 1 + r->groups[k] : 0;
        if (c->norm_mean != MT_REWARD_NORM_NONE) r->rewards[k] -= means[of_mean];
        if (c->norm_std != MT_REWARD_NORM_NONE)
            r->rewards[k] /= sqrt(squares[of_std] / mt_maximum(numbers[of_std] - 1, 1)) + 1e-6;
        if (clip > 0) r->rewards[k] = mt_bounded(r->rewards[k], -clip, clip);
    }
    free(numbers);
}

/* Responses of a group that compete. */
static int64_t competitors(const mt_rollouts *r) {
    return r->group_size - r->has_baselines;
}

static bool is_baseline(const mt_rollouts *r, int64_t s) {
    return s % r->group_size >= competitors(r);
}

/* True if the group is left out. rewards: of all responses. */
static bool is_dropped(const mt_rollouts *r, const mt_rollout_config *c, int64_t group, const double *rewards) {
    const double *of_group = rewards + group * r->group_size;
    if (!c->dynamic_sampling || competitors(r) == 1 || !isfinite(of_group[0])) return false;
    for (int64_t i = 1; i < competitors(r); i++)
        if (of_group[i] != of_group[0]) return false;
    return true;
}

/* Appends response s behind its prompt. */
static void append_sequence(mt_rollouts *r, const mt_rollout_config *c, int64_t s) {
    mt_samples *to = &r->samples;
    const mt_samples *prompts = r->prompts;
    int64_t first = to->offsets[to->count], prompt = prompts->offsets[r->prompt_of[s]];
    int64_t prompt_tokens = prompts->offsets[r->prompt_of[s] + 1] - prompt, end = first + prompt_tokens;
    memcpy(to->tokens + first, prompts->tokens + prompt, (size_t)prompt_tokens * 4);
    memcpy(to->tokens + end, r->responses[s], (size_t)r->response_tokens[s] * 4);
    end += r->response_tokens[s];
    if (c->whole && to->tokens[end - 1] == c->image_token_id) to->tokens[end - 1] = 0;
    if (c->whole) to->tokens[end++] = 0;
    bool counts = !(r->overlong[s] && c->overlong == MT_OVERLONG_MASK);
    const uint8_t *is_written = r->turns[s].is_written;
    for (int64_t i = first; i < end; i++) {
        int64_t at = i - first - prompt_tokens; // with `whole` there is one token more
        bool written = !is_written || at >= r->response_tokens[s] || is_written[mt_max(at, 0)];
        to->is_trained[i] = counts && at >= 0 && written;
    }
    for (int64_t i = first; i + 1 < end; i++) r->mask[r->T + i - first] = to->is_trained[i + 1];
    r->spans[to->count] = (mt_span){r->T, end - first - 1, r->T, end - first - 1, true};
    r->T += end - first - 1;
    r->response_of[to->count] = s, r->groups[to->count] = s / r->group_size;
    if (prompts->image_offsets) {
        int64_t image = prompts->image_offsets[r->prompt_of[s]];
        mt_images_borrow(&to->images, &prompts->images, image, prompts->image_offsets[r->prompt_of[s] + 1] - image);
        to->image_offsets[to->count + 1] = to->images.count;
    }
    to->offsets[++to->count] = end;
}

/* Means over all responses but baselines. */
static void count_responses(mt_rollouts *r) {
    mt_rollout_stats *stats = &r->stats;
    double count = (double)(r->num_prompts * competitors(r)), squares = 0;
    *stats = (mt_rollout_stats){0};
    for (int64_t s = 0; s < r->count; s++) {
        if (is_baseline(r, s)) continue;
        stats->score += r->scores[s] / count;
        stats->response_tokens += (double)r->response_tokens[s] / count;
        stats->overlong += r->overlong[s] / count;
        stats->turns += (double)r->turns[s].count / count;
    }
    for (int64_t s = 0; s < r->count; s++)
        if (!is_baseline(r, s)) squares += pow(r->scores[s] - stats->score, 2);
    stats->score_deviation = count > 1 ? sqrt(squares / (count - 1)) : 0;
}

void mt_rollouts_select(mt_rollouts *r, const mt_rollout_config *c) {
    int64_t tokens = 0;
    double *rewards = mt_malloc(r->count * 8);
    free_sequences(r);
    count_responses(r);
    for (int64_t s = 0; s < r->count; s++) {
        MT_CHECK(r->responses[s]);
        rewards[s] = reward_of(r, c, s);
        tokens += c->whole + r->response_tokens[s] + r->prompts->offsets[r->prompt_of[s] + 1] -
                  r->prompts->offsets[r->prompt_of[s]];
    }
    r->samples = (mt_samples){
        .offsets = mt_calloc((r->count + 1) * 8), .tokens = mt_malloc(tokens * 4), .is_trained = mt_malloc(tokens)};
    r->samples.image_config = r->prompts->image_config;
    if (r->prompts->image_offsets) r->samples.image_offsets = mt_calloc((r->count + 1) * 8);
    r->response_of = mt_malloc(r->count * 8), r->groups = mt_malloc(r->count * 8), r->rewards = mt_malloc(r->count * 8);
    r->baselines = mt_calloc(r->count * 8);
    r->spans = mt_malloc(r->count * (int64_t)sizeof *r->spans);
    r->mask = mt_malloc(tokens * 4);
    for (int64_t group = c->first / r->group_size; group < r->num_prompts; group++) {
        bool dropped = is_dropped(r, c, group, rewards);
        r->stats.groups_dropped += dropped;
        int64_t end = (group + 1) * r->group_size;
        for (int64_t s = group * r->group_size; !dropped && s < end; s++) {
            if (is_baseline(r, s) && !c->whole) continue;
            r->rewards[r->samples.count] = rewards[s];
            if (r->has_baselines) r->baselines[r->samples.count] = rewards[end - 1];
            append_sequence(r, c, s);
        }
    }
    if (normalises(c)) normalise_rewards(r, c);
    r->token_rewards = mt_calloc(r->T * 8), r->squares = mt_calloc(r->T * 8);
    for (int i = 0; i < MT_NUM_LOSS_INPUTS; i++) r->inputs[i] = mt_calloc(r->T * 8);
    free(rewards);
}

int64_t mt_rollouts_count(const mt_rollouts *r) {
    int64_t count = 0;
    for (int64_t t = 0; t < r->T; t++) count += r->mask[t] != 0;
    return count;
}

void mt_rollouts_keep(mt_rollouts *r, const float *keeps) {
    for (int64_t s = 0; s < r->samples.count; s++) {
        const mt_span *span = &r->spans[s];
        for (int64_t i = 0; i < span->q_len; i++) {
            int64_t at = span->q_start + i;
            if (keeps[at] != 0 || r->mask[at] == 0) continue;
            r->mask[at] = 0, r->samples.is_trained[r->samples.offsets[s] + i + 1] = 0;
        }
    }
}

/* The divergences[T] of the old policy from the teacher that are in the advantages; their mean is in `stats`. */
static void measure_divergences(mt_rollouts *r, const mt_rollout_config *c, double *divergences) {
    double sum = 0, counted = 0, unused, most = c->distill_max_clamp;
    for (int64_t t = 0; t < r->T; t++) {
        divergences[t] = 0;
        if (r->mask[t] == 0) continue;
        double d = mt_kl_estimate(c->distill_type, r->inputs[MT_OLD_LOGP][t], r->inputs[MT_TEACHER_LOGP][t], &unused);
        sum += d, counted += 1;
        divergences[t] = c->distill_coef * (most > 0 ? mt_bounded(d, -most, most) : d);
    }
    r->stats.distillation = sum / mt_maximum(counted, 1);
}

void mt_rollouts_advantages(mt_rollouts *r, const mt_rollout_config *c) {
    mt_loss_tokens tokens = {.T = r->T,
                             .num_sequences = r->samples.count,
                             .sequences = r->spans,
                             .mask = r->mask,
                             .old_logp = r->inputs[MT_OLD_LOGP],
                             .ref_logp = r->inputs[MT_REF_LOGP]};
    mt_token_rewards(r->token_rewards, &tokens, r->rewards, 0, c->kl_type, c->kl_in_reward);
    mt_advantage_tokens advantages = {.T = r->T,
                                      .num_sequences = r->samples.count,
                                      .sequences = r->spans,
                                      .mask = r->mask,
                                      .groups = r->groups,
                                      .rewards = r->token_rewards,
                                      .values = r->inputs[MT_OLD_VALUES],
                                      .advantages = r->inputs[MT_ADVANTAGES],
                                      .returns = r->inputs[MT_RETURNS],
                                      .baselines = r->baselines,
                                      .old_logp = r->inputs[MT_OLD_LOGP],
                                      .squares = r->squares,
                                      .rollout_weights = c->weighs_rollouts ? r->inputs[MT_ROLLOUT_WEIGHTS] : NULL,
                                      .part_weights = c->weights.items,
                                      .num_parts = c->weights.count};
    const double *parts[MT_MAX_INTS] = {0};
    double *scores = mt_malloc(mt_max(c->weights.count * r->samples.count, 1) * 8);
    for (int64_t i = 0; i < c->weights.count; i++) {
        double *part = scores + i * r->samples.count;
        for (int64_t k = 0; k < r->samples.count; k++) part[k] = r->parts[i][r->response_of[k]];
        parts[i] = part;
    }
    advantages.parts = parts;
    double *divergences = c->distill_coef != 0 ? mt_malloc(mt_max(r->T, 1) * 8) : NULL;
    if (divergences) measure_divergences(r, c, divergences);
    advantages.divergences = divergences;
    mt_advantages(&advantages, &c->advantage);
    free(scores), free(divergences);
    double counted = (double)mt_max(mt_rollouts_count(r), 1), kl = 0, advantage = 0, target = 0, unused;
    for (int64_t t = 0; t < r->T; t++) {
        if (r->mask[t] == 0) continue;
        advantage += r->inputs[MT_ADVANTAGES][t], target += r->inputs[MT_RETURNS][t];
        if (c->kl_in_reward != 0) kl += mt_kl_estimate(c->kl_type, tokens.old_logp[t], tokens.ref_logp[t], &unused);
    }
    r->stats.kl = kl / counted, r->stats.advantage = advantage / counted, r->stats.value_target = target / counted;
}

/* ---- micro-batches ---------------------------------------------------------------------------------------------- */

int64_t mt_rollouts_mini_batch(const mt_rollouts *r, bool shuffles, int64_t seed, int64_t step, int64_t epoch,
                               int64_t index, int64_t mini_batches, int64_t *sequences) {
    int64_t count = r->samples.count, first = count * index / mini_batches, end = count * (index + 1) / mini_batches;
    uint64_t of_step = mt_random_key((uint64_t)seed, UINT64_C(0x6d696e69), (uint64_t)step); // "mini"
    uint32_t *order = shuffles ? draw_order(count, mt_random_key(of_step, 0, (uint64_t)epoch)) : NULL;
    for (int64_t i = first; i < end; i++) sequences[i - first] = order ? order[i] : i;
    free(order);
    return end - first;
}

void mt_rollouts_plan(mt_step_plan *plan, const mt_rollouts *r, const int64_t *sequences, int64_t count, bool packs,
                      const mt_plan_shape *shape) {
    int64_t multiple = shape->num_ranks * shape->micro_batch_size, *lengths = mt_malloc(count * 8);
    mt_piece *pieces = mt_malloc(count * (int64_t)sizeof *pieces);
    mt_rows rows;
    for (int64_t i = 0; i < count; i++) {
        lengths[i] = r->spans[sequences[i]].q_len;
        MT_CHECK(lengths[i] <= shape->row_length);
    }
    mt_rows_pack(&rows, lengths, count, shape->row_length, packs ? count : 1, 0, 0);
    for (int64_t i = 0; i < count; i++) {
        int64_t sequence = sequences[rows.order[i]];
        pieces[i] = (mt_piece){sequence, r->spans[sequence].q_len, r->spans[sequence].q_start};
    }
    int64_t num_rows = mt_step_plan_slots(shape, mt_divide_up(rows.count, multiple)) * multiple;
    int64_t *first = mt_malloc((num_rows + 1) * 8);
    for (int64_t i = 0; i <= num_rows; i++) first[i] = rows.first[mt_min(i, rows.count)];
    mt_step_plan_balance(plan, pieces, first, num_rows, shape);
    mt_rows_free(&rows);
    free(lengths), free(pieces), free(first);
}

int64_t mt_rollouts_position(const mt_rollouts *r, const mt_batch *batch, int64_t t) {
    int64_t position = batch->token_index[t];
    return batch->loss_mask[t] != 0 && position >= 0 && position < r->T ? position : -1;
}

void mt_rollouts_load(const mt_rollouts *r, mt_batch *batch) {
    for (int i = 0; i < MT_NUM_LOSS_INPUTS; i++)
        for (int64_t t = 0; t < batch->num_tokens; t++) {
            int64_t position = mt_rollouts_position(r, batch, t);
            batch->loss_inputs[i][t] = position >= 0 ? (float)r->inputs[i][position] : 0;
        }
}

static void store_numbers(const mt_rollouts *r, double *to, const mt_batch *batch, const double *numbers) {
    for (int64_t t = 0; t < batch->num_tokens; t++) {
        int64_t position = mt_rollouts_position(r, batch, t);
        if (position >= 0) to[position] = numbers[t];
    }
}

void mt_rollouts_store(mt_rollouts *r, mt_loss_input input, const mt_batch *batch, const double *numbers) {
    store_numbers(r, r->inputs[input], batch, numbers);
}

void mt_rollouts_store_squares(mt_rollouts *r, const mt_batch *batch, const double *numbers) {
    store_numbers(r, r->squares, batch, numbers);
}
