/* timeline.c: pipeline schedules in simulated time, as text and as pictures. */
#include "timeline.h"

#include "../base/drawing.h"
#include "../base/file.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- simulated time. Invariant: messages of one rank in one direction are received in the order of sending, so a
 * queue is two counters and the times of their changes. */

/* Queue 2 * rank holds the messages that a rank sends forward, 2 * rank + 1 its messages backward. */
typedef struct mt_queues {
    int64_t in_flight, capacity;
    int64_t *sent, *received;   // [2 pp]
    double *ready_at, *free_at; // [2 pp, capacity]
} mt_queues;

/* Sends at `now`, or as soon as there is room; false while that time is unknown. */
static bool mt_queue_send(mt_queues *q, int64_t queue, double cost, double *now) {
    int64_t index = q->sent[queue], before = index - q->in_flight;
    if (q->in_flight > 0 && before >= q->received[queue]) return false;
    if (q->in_flight > 0 && before >= 0) *now = fmax(*now, q->free_at[queue * q->capacity + before]);
    q->ready_at[queue * q->capacity + index] = *now + cost;
    q->sent[queue]++;
    return true;
}

static bool mt_queue_receive(mt_queues *q, int64_t queue, double *now) {
    int64_t index = q->received[queue];
    if (index == q->sent[queue]) return false;
    *now = fmax(*now, q->ready_at[queue * q->capacity + index]);
    q->free_at[queue * q->capacity + index] = *now;
    q->received[queue]++;
    return true;
}

static double mt_action_cost(mt_action_kind kind, const mt_action_costs *costs) {
    if (kind == MT_ACTION_FORWARD) return costs->forward;
    return (kind != MT_ACTION_BACKWARD_WEIGHT ? costs->backward_input : 0) +
           (kind != MT_ACTION_BACKWARD_INPUT ? costs->backward_weight : 0);
}

/* Runs the action of `rank` at `index`; false if it must wait for an action of another rank. */
static bool mt_timeline_act(mt_timeline *t, mt_queues *queues, const mt_action_costs *stages, int64_t rank,
                            int64_t index, double *now) {
    mt_action action = t->actions[index];
    const mt_action_costs *costs = &stages[rank * t->schedule.vp + action.chunk];
    bool backward = action.kind == MT_ACTION_SEND_BACKWARD || action.kind == MT_ACTION_RECV_BACKWARD;
    double start = *now;
    switch (action.kind) {
    case MT_ACTION_SEND_FORWARD:
    case MT_ACTION_SEND_BACKWARD:
        if (!mt_queue_send(queues, 2 * rank + backward, costs->send, now)) return false;
        break;
    case MT_ACTION_RECV_FORWARD:
    case MT_ACTION_RECV_BACKWARD:
        if (!mt_queue_receive(queues, 2 * (int64_t)action.peer + backward, now)) return false;
        break;
    default:
        *now += mt_action_cost(action.kind, costs);
    }
    t->start[index] = start, t->end[index] = *now;
    return true;
}

/* Returns the work on the list of one rank, and sets its peak of forwards without their backward. */
static double mt_timeline_count(mt_timeline *t, int64_t rank, const mt_action_costs *stages) {
    double work = 0;
    int64_t held = 0;
    for (int64_t i = t->first[rank]; i < t->first[rank + 1]; i++) {
        mt_action_kind kind = t->actions[i].kind;
        if (kind > MT_ACTION_BACKWARD_WEIGHT) continue;
        work += mt_action_cost(kind, &stages[rank * t->schedule.vp + t->actions[i].chunk]);
        if (kind == MT_ACTION_BACKWARD || kind == MT_ACTION_BACKWARD_WEIGHT) held--;
        if (kind == MT_ACTION_FORWARD && t->schedule.kind != MT_SCHEDULE_FORWARD_ONLY) held++;
        if (held > t->live[rank]) t->live[rank] = held;
    }
    return work;
}

int mt_timeline_create_uneven(mt_timeline *t, const mt_schedule *schedule, const mt_action_costs *costs,
                              int64_t in_flight) {
    int64_t pp = schedule->pp, capacity = schedule->micro_batches * schedule->vp, done = 0;
    *t = (mt_timeline){.schedule = *schedule, .first = mt_calloc((pp + 1) * 8), .live = mt_calloc(pp * 8)};
    for (int64_t r = 0; r < pp; r++) t->first[r + 1] = t->first[r] + mt_schedule_actions(NULL, schedule, r);
    t->actions = mt_malloc(t->first[pp] * (int64_t)sizeof(mt_action));
    t->start = mt_calloc(t->first[pp] * 8), t->end = mt_calloc(t->first[pp] * 8);
    for (int64_t r = 0; r < pp; r++) mt_schedule_actions(t->actions + t->first[r], schedule, r);
    int64_t *counters = mt_calloc(5 * pp * 8), *next = counters + 4 * pp;
    double *times = mt_calloc((4 * capacity + 1) * pp * 8), *now = times + 4 * capacity * pp;
    mt_queues queues = {in_flight, capacity, counters, counters + 2 * pp, times, times + 2 * pp * capacity};
    for (bool progress = true; progress;) {
        progress = false;
        for (int64_t r = 0; r < pp; r++)
            for (; t->first[r] + next[r] < t->first[r + 1]; next[r]++, done++, progress = true)
                if (!mt_timeline_act(t, &queues, costs, r, t->first[r] + next[r], &now[r])) break;
    }
    double work = 0;
    for (int64_t r = 0; r < pp; r++) {
        work += mt_timeline_count(t, r, costs);
        t->span = fmax(t->span, now[r]);
    }
    t->bubble = (t->span * (double)pp - work) / work;
    free(counters), free(times);
    return done == t->first[pp] ? 0 : -1;
}

int mt_timeline_create(mt_timeline *t, const mt_schedule *schedule, const mt_action_costs *costs, int64_t in_flight) {
    mt_action_costs *stages = mt_malloc(schedule->pp * schedule->vp * (int64_t)sizeof *stages);
    for (int64_t i = 0; i < schedule->pp * schedule->vp; i++) stages[i] = *costs;
    int status = mt_timeline_create_uneven(t, schedule, stages, in_flight);
    free(stages);
    return status;
}

void mt_timeline_free(mt_timeline *t) {
    free(t->first), free(t->actions), free(t->start), free(t->end), free(t->live);
    *t = (mt_timeline){.first = NULL};
}

/* ---- text and pictures */

static void print_layout(const mt_stage *stages, const mt_schedule *s, FILE *file) {
    for (int64_t rank = 0; rank < s->pp; rank++) {
        fprintf(file, "rank %lld:", (long long)rank);
        for (int64_t i = rank; i < s->pp * s->vp; i += s->pp) {
            const mt_stage *stage = &stages[i];
            if (s->vp > 1) fprintf(file, "%s %c", i == rank ? "" : ";", (char)('a' + i / s->pp % 26));
            fprintf(file, "%s", stage->embedding ? " embedding" : "");
            if (stage->num_layers == 1) fprintf(file, " layer %lld", (long long)stage->first_layer);
            if (stage->num_layers > 1)
                fprintf(file, " layers %lld-%lld", (long long)stage->first_layer,
                        (long long)(stage->first_layer + stage->num_layers - 1));
            if (stage->num_mtp > 0) fprintf(file, " mtp x %lld", (long long)stage->num_mtp);
            fprintf(file, "%s", stage->loss ? " loss" : stage->num_layers == 0 && !stage->embedding ? " empty" : "");
        }
        fprintf(file, "\n");
    }
}

/* Fills one rank's row, `width` characters per unit: a forward "3 ", a backward "[3 ]", its parts "[3" and "3]", idle
 * time ".". With several chunks a letter follows the number: "3a". */
static void fill_row(const mt_timeline *t, int64_t rank, int width, char *row) {
    int64_t units = llround(t->span);
    for (int64_t i = 0; i < units * width; i++) row[i] = i % width == width - 2 ? '.' : ' ';
    row[units * width] = 0;
    for (int64_t i = t->first[rank]; i < t->first[rank + 1]; i++) {
        const mt_action *action = &t->actions[i];
        if (action->peer >= 0) continue;
        char label[32], suffix[2] = {t->schedule.vp > 1 ? (char)('a' + action->chunk % 26) : '\0', '\0'};
        int length = snprintf(label, sizeof label, "%lld%s", (long long)action->micro_batch, suffix);
        int64_t from = llround(t->start[i]) * width, to = llround(t->end[i]) * width;
        memset(row + from, ' ', (size_t)(to - from));
        bool begins = action->kind == MT_ACTION_BACKWARD || action->kind == MT_ACTION_BACKWARD_INPUT;
        memcpy(row + from + (begins ? width : width - 1) - length, label, (size_t)length);
        if (begins) row[from] = '[';
        if (action->kind == MT_ACTION_BACKWARD || action->kind == MT_ACTION_BACKWARD_WEIGHT) row[to - 1] = ']';
    }
}

/* Prints all rows, in strips of at most 100 columns. */
static void print_timeline(const mt_timeline *t, FILE *file) {
    char text[32];
    int width = snprintf(text, sizeof text, "%lld", (long long)(t->schedule.micro_batches - 1)) + 1;
    int margin = snprintf(text, sizeof text, "rank %lld  ", (long long)(t->schedule.pp - 1));
    if (t->schedule.vp > 1 || t->schedule.kind == MT_SCHEDULE_ZB_H1) width++;
    int64_t units = llround(t->span), strip = (100 - margin - 12) / width;
    char *row = mt_malloc(units * width + 1);
    for (int64_t first = 0; first < units; first += strip) {
        int64_t shown = first + strip < units ? strip : units - first;
        if (first > 0) fprintf(file, "\n");
        for (int64_t rank = 0; rank < t->schedule.pp; rank++) {
            fill_row(t, rank, width, row);
            snprintf(text, sizeof text, "rank %lld", (long long)rank);
            fprintf(file, "%-*s%.*s", margin, text, (int)shown * width, row + first * width);
            if (first + strip >= units) fprintf(file, "  peak %lld", (long long)t->live[rank]);
            fprintf(file, "\n");
        }
    }
    free(row);
}

/* Draws the time [from, to); an action at its edge is cut. */
static void draw_strip(const mt_timeline *t, FILE *svg, double x, double y, double unit, double from, double to) {
    static const char *const fills[] = {"#9cc3e6", "#a9d18e", "#a9d18e", "#9fd6cf"}; // by mt_action_kind
    const double height = 24;
    for (int64_t rank = 0; rank < t->schedule.pp; rank++) {
        double top = y + height * (double)rank;
        fprintf(svg, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">%lld</text>\n", x - 8, top + 15, (long long)rank);
        fprintf(svg, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"#eceee9\"/>\n", x, top,
                unit * (to - from), height - 2);
        for (int64_t i = t->first[rank]; i < t->first[rank + 1]; i++) {
            const mt_action *action = &t->actions[i];
            double begin = fmax(t->start[i], from), end = fmin(t->end[i], to);
            if (action->peer >= 0 || begin >= end) continue;
            double opacity = 1 - 0.7 * (double)action->chunk / (double)t->schedule.vp;
            fprintf(svg,
                    "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\" fill-opacity=\"%.2f\" "
                    "stroke=\"#24292f\" stroke-width=\"0.6\"/>\n",
                    x + unit * (begin - from), top, unit * (end - begin), height - 2, fills[action->kind], opacity);
            fprintf(svg, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%lld</text>\n",
                    x + unit * ((begin + end) / 2 - from), top + 15, (long long)action->micro_batch);
        }
        if (to < t->span) continue;
        fprintf(svg, "<text x=\"%.1f\" y=\"%.1f\">%lld</text>\n", x + unit * (to - from) + 8, top + 15,
                (long long)t->live[rank]);
    }
}

void mt_timeline_draw(const mt_timeline *t, FILE *svg, double x, double y, double unit) {
    draw_strip(t, svg, x, y, unit, 0, t->span);
}

/* Such as "interleaved schedule: 4 ranks of 2 stages, 8 micro-batches". */
static void write_title(const mt_schedule *s, char title[200]) {
    static const char *const names[] = {"1F1B", "interleaved", "ZB-H1", "forward-only"};
    snprintf(title, 200, "%s schedule: %lld ranks of %lld stage%s, %lld micro-batches", names[s->kind],
             (long long)s->pp, (long long)s->vp, s->vp > 1 ? "s" : "", (long long)s->micro_batches);
}

/* In strips of at most 48 units of time, one below another. */
static int save_timeline(const mt_timeline *t, const char *path, mt_error *error) {
    const double unit = 24, strip = fmin(t->span, 48), rows = 24 * (double)t->schedule.pp;
    char title[200];
    write_title(&t->schedule, title);
    double width = fmax(60 + unit * strip + 60, 640), height = 66 + (rows + 24) * ceil(t->span / strip);
    mt_new_file file;
    if (mt_drawing_open(&file, path, width, height, title, error) != 0) return -1;
    FILE *svg = file.stream;
    fprintf(svg,
            "<text x=\"40\" y=\"24\">%s: bubble %.1f%% of the work</text>\n<text x=\"40\" y=\"44\">blue: forward, "
            "green: backward, teal: its weights' part; lighter: later stages; right: peak live micro-batches</text>\n",
            title, 100 * t->bubble);
    for (double from = 0, y = 64; from < t->span; from += strip, y += rows + 24)
        draw_strip(t, svg, 40, y, unit, from, fmin(from + strip, t->span));
    fprintf(svg, "</svg>\n");
    return mt_new_file_close(&file, 0, error);
}

int mt_schedule_print(const mt_run_options *o, FILE *file, mt_error *error) {
    const mt_action_costs units = {1, 1, 1, 0};
    mt_schedule s = mt_schedule_of(&o->stack, o->stack.global_batch_size /
                                                  (o->stack.micro_batch_size * o->stack.data_parallel_size));
    if (s.pp * s.vp > 1000000 / s.micro_batches)
        return mt_error_set(error, "--print-schedule draws at most a million forwards; lower --global-batch-size, %lld",
                            (long long)o->stack.global_batch_size);
    mt_stage *stages = mt_malloc(s.pp * s.vp * (int64_t)sizeof(mt_stage));
    mt_timeline timeline;
    char title[200];
    int status = 0;
    mt_pipeline_layout_build(stages, &o->stack);
    MT_CHECK(mt_timeline_create(&timeline, &s, &units, 0) == 0);
    write_title(&s, title);
    fprintf(file, "%s\n\n", title);
    print_layout(stages, &s, file);
    fprintf(file, "\n");
    print_timeline(&timeline, file);
    fprintf(file,
            "\n3 is a forward of micro-batch 3%s, %s; forward = 1 unit, backward = 2.\n"
            "peak: live micro-batches%s. Bubble: %lld of %lld units, %.1f%% of the work.\n",
            s.vp > 1 ? " (a, b, ...: the stage)" : "",
            s.kind == MT_SCHEDULE_ZB_H1 ? "[3 the backward of its input, 3] of its weights" : "[3 ] its backward",
            s.vp > 1 ? " x stages" : "", (long long)llround(timeline.span * timeline.bubble / (1 + timeline.bubble)),
            (long long)llround(timeline.span), 100 * timeline.bubble);
    if (strcmp(o->print_schedule, "-") != 0) status = save_timeline(&timeline, o->print_schedule, error);
    mt_timeline_free(&timeline);
    free(stages);
    return status;
}
