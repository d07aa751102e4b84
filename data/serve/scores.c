/* scores.c: the log-probabilities of a sequence's tokens and of their most probable rivals. */
#include "scores.h"

#include <stdlib.h>

void mt_scores_begin(mt_scores *s, int64_t first, int64_t end, int64_t num_rivals, int64_t vocab_size) {
    int64_t tokens = mt_max(end - first, 1), rivals = mt_min(num_rivals, vocab_size);
    MT_CHECK(first >= 1 && rivals <= MT_MAX_RIVALS);
    *s = (mt_scores){.first = first, .end = end, .num_rivals = rivals, .vocab_size = vocab_size};
    s->logps = mt_malloc(tokens * 4);
    s->rivals = mt_malloc(mt_max(tokens * rivals, 1) * 4), s->rival_logps = mt_malloc(mt_max(tokens * rivals, 1) * 4);
}

void mt_scores_end(mt_scores *s) {
    free(s->logps), free(s->rivals), free(s->rival_logps);
    *s = (mt_scores){.first = 0};
}

/* The most probable tokens, the lowest id first among equals. */
static int64_t find_rivals(int32_t *best, int64_t wanted, const float *logits, int64_t vocab_size) {
    int64_t count = 0;
    for (int64_t v = 0; v < vocab_size && wanted > 0; v++) {
        if (count == wanted && !(logits[v] > logits[best[count - 1]])) continue;
        int64_t at = count < wanted ? count++ : count - 1;
        for (; at > 0 && logits[v] > logits[best[at - 1]]; at--) best[at] = best[at - 1];
        best[at] = (int32_t)v;
    }
    return count;
}

void mt_scores_view(void *scores, const mt_sequence *sequence, int64_t position, const float *logits) {
    mt_scores *s = scores;
    int64_t at = position + 1 - s->first, n = s->num_rivals;
    if (at < 0 || position + 1 >= mt_min(s->end, sequence->num_tokens)) return;
    int32_t token = sequence->tokens[position + 1];
    s->logps[at] = mt_logits_logp(logits, s->vocab_size, token);
    find_rivals(s->rivals + at * n, n, logits, s->vocab_size);
    for (int64_t i = 0; i < n; i++) {
        double distance = (double)logits[s->rivals[at * n + i]] - (double)logits[token];
        s->rival_logps[at * n + i] = (float)((double)s->logps[at] + distance);
    }
}
