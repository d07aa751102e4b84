/* partial.c: see partial.h. */
#include "partial.h"

#include <stdlib.h>
#include <string.h>

void mt_partial_group_free(mt_partial_group *group, int64_t each) {
    for (int64_t i = 0; i < each && group->responses; i++) {
        mt_partial *r = &group->responses[i];
        free(r->tokens), free(r->logps), free(r->versions), free(r->old_logps), free(r->routes);
    }
    free(group->responses);
    *group = (mt_partial_group){0};
}

void mt_partials_free(mt_partials *p) {
    for (int64_t g = 0; g < p->count; g++) mt_partial_group_free(&p->groups[g], p->each);
    free(p->groups);
    *p = (mt_partials){.each = p->each};
}

void mt_partials_begin(mt_partials *p, int64_t position, int64_t prompt, int64_t batch) {
    p->groups = mt_realloc(p->groups, (p->count + 1) * (int64_t)sizeof *p->groups);
    p->groups[p->count++] =
        (mt_partial_group){position, prompt, batch, mt_calloc(p->each * (int64_t)sizeof(mt_partial))};
}

void mt_partial_append(mt_partial *r, const int32_t *tokens, const float *logps, int64_t count, int64_t version) {
    int64_t after = r->count + count;
    MT_CHECK(count >= 1 && !r->ended);
    r->tokens = mt_realloc(r->tokens, after * 4), r->logps = mt_realloc(r->logps, after * 4);
    r->versions = mt_realloc(r->versions, after * 8);
    memcpy(r->tokens + r->count, tokens, (size_t)count * 4);
    memcpy(r->logps + r->count, logps, (size_t)count * 4);
    for (int64_t i = r->count; i < after; i++) r->versions[i] = version;
    r->count = after;
}

static bool has_ended(const mt_partial_group *group, int64_t each) {
    for (int64_t i = 0; i < each; i++)
        if (!group->responses[i].ended) return false;
    return true;
}

bool mt_partials_suffice(const mt_partials *p, int64_t wanted, int64_t batch, int64_t most_age) {
    int64_t ended = 0;
    for (int64_t g = 0; g < p->count; g++) {
        bool has = has_ended(&p->groups[g], p->each);
        if (!has && p->groups[g].batch <= batch - most_age) return false;
        ended += has;
    }
    return ended >= wanted;
}

void mt_partials_take(mt_partials *p, int64_t wanted, mt_partial_group *taken) {
    int64_t left = 0, count = 0;
    for (int64_t g = 0; g < p->count; g++) {
        if (count < wanted && has_ended(&p->groups[g], p->each))
            taken[count++] = p->groups[g];
        else
            p->groups[left++] = p->groups[g];
    }
    MT_CHECK(count == wanted);
    p->count = left;
}

int64_t mt_partials_unfinished(const mt_partials *p) {
    int64_t unfinished = 0;
    for (int64_t g = 0; g < p->count; g++)
        for (int64_t i = 0; i < p->each; i++) unfinished += !p->groups[g].responses[i].ended;
    return unfinished;
}
