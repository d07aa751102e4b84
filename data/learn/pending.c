/* pending.c: see pending.h. One function goes through the fields of a batch, whether it writes or reads them. */
#include "pending.h"

#include "../base/file.h"

#include <stdlib.h>
#include <string.h>

static const char mt_pending_magic[8] = "MTROLL1"; // with its 0

/* Bytes that are written, or read. */
typedef struct stream {
    char *bytes; // of a writer: to free
    int64_t size, at;
    bool reads, failed;
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
}

void mt_pending_free(mt_pending *batch) {
    mt_rollouts_free(&batch->rollouts);
    free(batch->routes.experts);
    *batch = (mt_pending){0};
}

char *mt_pending_write(const mt_pending *batches, int64_t count, int64_t row, int64_t *size) {
    stream s = {0};
    char magic[sizeof mt_pending_magic];
    memcpy(magic, mt_pending_magic, sizeof magic);
    pass(&s, magic, sizeof magic);
    pass_int(&s, &count), pass_int(&s, &row);
    for (int64_t i = 0; i < count; i++) {
        mt_pending batch = batches[i]; // only read
        pass_batch(&s, &batch, row, NULL, NULL);
    }
    *size = s.at;
    return s.bytes;
}

int64_t mt_pending_read(mt_pending *batches, int64_t most, const char *bytes, int64_t size, int64_t row,
                        const mt_samples *prompts, const mt_rollout_config *config, mt_error *error) {
    stream s = {.bytes = (char *)bytes, .size = size, .reads = true}; // only read
    char magic[sizeof mt_pending_magic] = "";
    int64_t count = 0, wide = 0, read = 0;
    pass(&s, magic, sizeof magic);
    pass_int(&s, &count), pass_int(&s, &wide);
    if (s.failed || memcmp(magic, mt_pending_magic, sizeof magic) != 0)
        return mt_error_set(error, "holds no rollouts of this program");
    if (count < 0 || count > most)
        return mt_error_set(error, "holds %lld batches of rollouts, more than the %lld of the longest --rollout-lag",
                            (long long)count, (long long)most);
    if (wide != row && wide * row != 0) return mt_error_set(error, "holds the routes of another model");
    for (; read < count && !s.failed; read++) pass_batch(&s, &batches[read], wide, prompts, config);
    if (!s.failed && s.at == size) return count;
    for (int64_t i = 0; i < read; i++) mt_pending_free(&batches[i]);
    return mt_error_set(error, "is damaged, or was written for other prompts");
}
