/* pace.c: how much of the prompts a step reads. */
#include "pace.h"

/* Prompts get a step of 2.5 at most, as measured times are not exact. One that took up to 3 proves as much for less
 * work, whatever the part of it that does not depend on the work; a longer one proves nothing. Times that are too short
 * by chance raise the limit by no more than GROWTH. */
static const double STEPS_WANTED = 2.5, GROWTH = 4;

/* The streams are measured after so many steps with prompts, or where the last measurement is of many more or fewer. */
enum { STEPS_BETWEEN = 16 };
static const double SHARE_KNOWN = 0.75;

mt_pace mt_pace_open(const mt_prefill *most) {
    return (mt_pace){.most = *most};
}

static double ratio(int64_t part, int64_t whole) {
    return whole > 0 ? (double)part / (double)whole : 1;
}

/* At most the share of the time of `then` that `now` takes. */
static double share_of(const mt_streams *now, const mt_streams *then) {
    return mt_minimum(1, mt_minimum(ratio(now->count, then->count), ratio(now->keys, then->keys)));
}

/* True if measurements of either say much of the other. */
static bool are_alike(const mt_streams *a, const mt_streams *b) {
    return share_of(a, b) >= SHARE_KNOWN && share_of(b, a) >= SHARE_KNOWN;
}

/* A lower bound of the seconds of the streams alone: the median of the bounds by the last measurements, of streams that
 * are alike where there are some. */
static double step_of_streams(const mt_pace *p) {
    double sorted[MT_PACE_SAMPLES];
    int64_t known = mt_min(p->num_alone, MT_PACE_SAMPLES), count = 0;
    bool any = false;
    for (int64_t i = 0; i < known; i++) any |= are_alike(&p->streams, &p->alone[i].streams);
    for (int64_t i = 0; i < known; i++) {
        if (any && !are_alike(&p->streams, &p->alone[i].streams)) continue;
        double bound = p->alone[i].seconds * share_of(&p->streams, &p->alone[i].streams);
        int64_t at = count++;
        for (; at > 0 && sorted[at - 1] > bound; at--) sorted[at] = sorted[at - 1];
        sorted[at] = bound;
    }
    return count > 0 ? sorted[(count - 1) / 2] : 0;
}

/* True if the streams are to be measured before a step beside them is bounded. */
static bool is_unknown(const mt_pace *p) {
    if (p->num_alone == 0 || p->since >= STEPS_BETWEEN) return true;
    return p->since > 0 && !are_alike(&p->streams, &p->alone[(p->num_alone - 1) % MT_PACE_SAMPLES].streams);
}

/* True if the last step that counted bounds the next one, as it took no more than 3 of the streams, `step`. */
static bool proves(const mt_pace *p, double step) {
    return p->read.tokens > 0 && p->cost <= (MT_PACE_STEPS - 1) * step;
}

/* True if a prompt had no more to read than that step, which took no less time. */
static bool says_less(const mt_prefill *read, double cost, const mt_pace *p) {
    const mt_prefill *most = &p->read;
    return read->tokens <= most->tokens && read->keys <= most->keys && read->viewed <= most->viewed &&
           read->patches <= most->patches && read->patch_pairs <= most->patch_pairs && cost <= p->cost;
}

static int64_t scaled(int64_t work, double factor, int64_t most) {
    double product = (double)work * factor;
    return product < (double)most ? (int64_t)product : most;
}

mt_prefill mt_pace_next(mt_pace *p, const mt_streams *streams) {
    p->streams = *streams;
    if (streams->count == 0) return p->most;
    if (is_unknown(p)) return (mt_prefill){.tokens = 0};
    double step = step_of_streams(p), wanted = (STEPS_WANTED - 1) * step;
    double factor = p->cost > 0 ? mt_minimum(wanted / p->cost, GROWTH) : GROWTH;
    if (!proves(p, step)) return (mt_prefill){.tokens = 1};
    return (mt_prefill){.tokens = mt_max(scaled(p->read.tokens, factor, p->most.tokens), 1),
                        .keys = scaled(p->read.keys, factor, p->most.keys),
                        .viewed = scaled(p->read.viewed, factor, p->most.viewed),
                        .patches = scaled(p->read.patches, factor, p->most.patches),
                        .patch_pairs = scaled(p->read.patch_pairs, factor, p->most.patch_pairs)};
}

void mt_pace_note(mt_pace *p, const mt_prefill *read, double seconds) {
    if (p->streams.count == 0) return;
    p->since++;
    if (read->tokens == 0) {
        int64_t at = p->num_alone++ % MT_PACE_SAMPLES;
        p->alone[at].streams = p->streams, p->alone[at].seconds = seconds;
        p->since = 0;
        return;
    }
    double step = step_of_streams(p), cost = seconds - step;
    if (!proves(p, step) || !says_less(read, cost, p)) p->cost = cost, p->read = *read;
}
