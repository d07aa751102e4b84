/* pending.c: see pending.h. One function goes through the fields of a batch, whether it writes or reads them. */
#include "pending.h"

#include "../base/file.h"

#include <stdlib.h>
#include <string.h>

/* With its 0. The first has no versions of weights and no responses in progress. */
static const char mt_first_magic[8] = "MTROLL1", mt_waiting_magic[8] = "MTROLL2";

/* Bytes that are written, or read. */
typedef struct stream {
    char *bytes; // of a writer: to free
    int64_t size, at;
    bool reads, failed;
    bool is_first; // mt_first_magic
} stream;

/* Writes data[bytes], or reads them. */
static void pass(stream *s, void *data, int64_t bytes) {
    if (s->reads && (bytes < 0 || bytes > s->size - s->at)) s->failed = true;
    if (s->failed) return;
    if (!s->reads) s->bytes = mt_realloc(s->bytes, mt_max(s->at + bytes, 1));
    if (bytes > 0)
        memcpy(s->reads ? (char *)data : s->bytes + s->at, s->reads ? s->bytes + s->at : data, (size_t)bytes);
    s->at += bytes;
}

static void pass_int(stream *s, int64_t *number) {
    pass(s, number, 8);
}

/* An array of `bytes` bytes, which a reader allocates; `exists`: it is not NULL. */
static void pass_array(stream *s, void *array, int64_t bytes) {
    void *data = NULL;
    int64_t exists = 0;
    memcpy(&data, array, sizeof data);
    exists = data != NULL;
    pass_int(s, &exists);
    if (!exists || s->failed) return;
    if (s->reads && (bytes < 0 || bytes > s->size - s->at)) s->failed = true;
    if (s->failed) return;
    if (s->reads) data = mt_malloc(mt_max(bytes, 1));
    pass(s, data, bytes);
    memcpy(array, &data, sizeof data);
}

/* Responses, their scores and turns. */
static void pass_responses(stream *s, mt_rollouts *r) {
    for (int64_t i = 0; i < r->count && !s->failed; i++) {
        mt_turns *t = &r->turns[i];
        pass_int(s, &r->response_tokens[i]);
        if (s->reads && (r->response_tokens[i] < 1 || r->response_tokens[i] > s->size)) s->failed = true;
        if (s->failed) return;
        pass_array(s, &r->responses[i], r->response_tokens[i] * 4);
        pass(s, &r->overlong[i], 1);
        pass(s, &r->scores[i], 8);
        pass_array(s, &t->is_written, r->response_tokens[i]);
        pass_int(s, &t->count), pass_int(s, &t->last), pass(s, &t->reward, 8);
        s->failed |= s->reads && !r->responses[i];
    }
    for (int i = 0; i < MT_MAX_INTS; i++) pass_array(s, &r->parts[i], r->count * 8);
}

/* The prompts; a reader begins the rollouts. */
static void pass_prompts(stream *s, mt_rollouts *r, const mt_samples *prompts) {
    int64_t sizes[] = {r->num_prompts, r->group_size, r->has_baselines};
    pass(s, sizes, sizeof sizes);
    bool good = sizes[0] >= 1 && sizes[1] >= 1 && sizes[0] <= (s->reads ? s->size : sizes[0]) &&
                sizes[1] <= (s->reads ? s->size / sizes[0] : sizes[1]);
    if (s->failed || !good) {
        s->failed = true;
        return;
    }
    int64_t *order = mt_calloc(sizes[0] * 8);
    for (int64_t i = 0; i < sizes[0] && !s->reads; i++) order[i] = r->prompt_of[i * sizes[1]];
    pass(s, order, sizes[0] * 8);
    for (int64_t i = 0; i < sizes[0] && s->reads; i++) s->failed |= order[i] < 0 || order[i] >= prompts->count;
    if (s->reads && !s->failed) mt_rollouts_begin(r, prompts, order, sizes[0], sizes[1]);
    if (s->reads) r->has_baselines = sizes[2] != 0;
    free(order);
}

static void pass_batch(stream *s, mt_pending *b, int64_t row, const mt_samples *prompts,
                       const mt_rollout_config *config) {
    mt_rollouts *r = &b->rollouts;
    pass_prompts(s, r, prompts);
    if (!s->failed) pass_responses(s, r);
    if (s->failed) return;
    if (s->reads) mt_rollouts_select(r, config);
    int64_t T = r->T;
    pass_int(s, &T);
    s->failed |= T != r->T;
    if (s->failed) return;
    float *mask = s->reads ? mt_malloc(mt_max(T, 1) * 4) : r->mask;
    pass(s, mask, T * 4);
    if (s->reads && !s->failed) mt_rollouts_keep(r, mask);
    if (s->reads) free(mask);
    pass(s, r->inputs[MT_OLD_LOGP], T * 8), pass(s, r->inputs[MT_ROLLOUT_WEIGHTS], T * 8), pass(s, r->squares, T * 8);
    pass_array(s, &b->routes.experts, T * row * 4);
    pass_int(s, &b->iteration), pass_int(s, &b->rounds);
    pass(s, &b->mismatch, sizeof b->mismatch);
    pass(s, &b->generation_gap, 8), pass(s, &b->cut, 8), pass(s, &b->rejected, 8), pass(s, &b->entropy, 8);
    if (s->is_first)
        b->versions = (mt_versions){.mean = (double)b->iteration, .oldest = b->iteration};
    else
        pass(s, &b->versions.mean, 8), pass_int(s, &b->versions.oldest), pass(s, &b->versions.continued, 8),
            pass(s, &b->is_unscored, sizeof b->is_unscored);
}

/* A response in progress. A row of routes has `row` elements. */
static void pass_partial(stream *s, mt_partial *r, int64_t row) {
    int64_t ended = r->ended, overlong = r->overlong;
    pass_int(s, &r->count), pass_int(s, &r->num_scored), pass_int(s, &r->num_routes);
    pass_int(s, &ended), pass_int(s, &overlong);
    r->ended = ended != 0, r->overlong = overlong != 0;
    bool good = r->count >= 0 && r->count <= s->size && r->num_scored >= 0 && r->num_scored <= r->count &&
                r->num_routes >= 0 && r->num_routes <= s->size;
    s->failed |= s->reads && !good;
    if (s->failed) return;
    pass_array(s, &r->tokens, r->count * 4), pass_array(s, &r->logps, r->count * 4);
    pass_array(s, &r->versions, r->count * 8), pass_array(s, &r->old_logps, r->num_scored * 8);
    pass_array(s, &r->routes, r->num_routes * row * 4);
    if (s->reads && row == 0) free(r->routes), r->routes = NULL, r->num_routes = 0; // of a run without replay
    s->failed |= s->reads && r->count > 0 && (!r->tokens || !r->logps || !r->versions);
    s->failed |= s->reads && r->num_scored > 0 && !r->old_logps;
}

static void pass_partials(stream *s, mt_partials *p, int64_t row, const mt_samples *prompts) {
    int64_t sizes[] = {p->count, p->each};
    pass(s, sizes, sizeof sizes);
    s->failed |= s->reads && (sizes[0] < 0 || sizes[0] > s->size || (sizes[0] > 0 && sizes[1] != p->each));
    for (int64_t g = 0; g < sizes[0] && !s->failed; g++) {
        if (s->reads) mt_partials_begin(p, 0, 0, 0);
        mt_partial_group *group = &p->groups[g];
        int64_t numbers[] = {group->position, group->prompt, group->batch};
        pass(s, numbers, sizeof numbers);
        if (s->reads) group->position = numbers[0], group->prompt = numbers[1], group->batch = numbers[2];
        s->failed |= s->reads && (numbers[1] < 0 || numbers[1] >= prompts->count);
        for (int64_t i = 0; i < p->each && !s->failed; i++) pass_partial(s, &group->responses[i], row);
    }
}

void mt_pending_free(mt_pending *batch) {
    mt_rollouts_free(&batch->rollouts);
    free(batch->routes.experts);
    *batch = (mt_pending){0};
}

void mt_waiting_clear(mt_waiting *w) {
    for (int64_t i = 0; i < w->count; i++) mt_pending_free(&w->batches[i]);
    mt_partials_free(&w->partials);
    w->count = 0;
}

char *mt_waiting_write(const mt_waiting *w, int64_t row, int64_t *size) {
    stream s = {0};
    char magic[sizeof mt_waiting_magic];
    int64_t count = w->count;
    mt_partials partials = w->partials; // only read
    memcpy(magic, mt_waiting_magic, sizeof magic);
    pass(&s, magic, sizeof magic);
    pass_int(&s, &count), pass_int(&s, &row);
    for (int64_t i = 0; i < count; i++) {
        mt_pending batch = w->batches[i]; // only read
        pass_batch(&s, &batch, row, NULL, NULL);
    }
    pass_partials(&s, &partials, row, NULL);
    *size = s.at;
    return s.bytes;
}

int mt_waiting_read(mt_waiting *w, const char *bytes, int64_t size, int64_t row, const mt_samples *prompts,
                    const mt_rollout_config *config, mt_error *error) {
    stream s = {.bytes = (char *)bytes, .size = size, .reads = true}; // only read
    char magic[sizeof mt_waiting_magic] = "";
    int64_t count = 0, wide = 0;
    pass(&s, magic, sizeof magic);
    pass_int(&s, &count), pass_int(&s, &wide);
    s.is_first = memcmp(magic, mt_first_magic, sizeof magic) == 0;
    if (s.failed || (!s.is_first && memcmp(magic, mt_waiting_magic, sizeof magic) != 0))
        return mt_error_set(error, "holds no rollouts of this program");
    if (count < 0 || count > w->most)
        return mt_error_set(error, "holds %lld batches of rollouts, more than the %lld of the longest --rollout-lag",
                            (long long)count, (long long)w->most);
    if (wide != row && wide * row != 0) return mt_error_set(error, "holds the routes of another model");
    while (w->count < count && !s.failed) pass_batch(&s, &w->batches[w->count++], wide, prompts, config);
    if (!s.failed && !s.is_first) pass_partials(&s, &w->partials, wide, prompts);
    if (!s.failed && s.at == size) return 0;
    mt_waiting_clear(w);
    return mt_error_set(error, "is damaged, or was written for other prompts or another --num-return-sequences");
}
