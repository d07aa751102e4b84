/* writer.c: the thread that writes answers. */
#include "writer.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_EVENTS = 1 << 16 }; // that stay with their owner, or wait for the writer, before the owner waits

typedef enum event_kind { TOKEN, END, STEP, STATE } event_kind;

typedef struct event {
    event_kind kind;
    mt_choice *choice; // of a token
    int32_t token;
    mt_finish finish;
    mt_job *job; // that ends
    int status;
    const char *message;
    double seconds;
    mt_gauges gauges;
} event;

typedef struct events {
    event *items;
    int64_t count, capacity;
} events;

typedef struct stops {
    mt_stopped *items;
    int64_t count, capacity;
} stops;

struct mt_writer {
    mt_counters *counters;
    pthread_t thread;
    events given; // of the owner: not handed over yet
    stops taken;  // of the owner: see mt_writer_stopped
    events work;  // of the writer
    stops found;  // of the writer
    pthread_mutex_t lock;
    pthread_cond_t arrival, space;
    events box;      // under the lock: for the writer
    stops stopped;   // under the lock: for the owner
    bool is_closing; // under the lock
};

static void *grow(void *array, int64_t *capacity, int64_t wanted, int64_t size) {
    if (wanted <= *capacity) return array;
    *capacity = mt_max(wanted, 2 * *capacity);
    return mt_realloc(array, *capacity * size);
}

static void append(events *to, const event *from, int64_t count) {
    if (count == 0) return;
    to->items = grow(to->items, &to->capacity, to->count + count, (int64_t)sizeof *to->items);
    memcpy(to->items + to->count, from, (size_t)count * sizeof *from);
    to->count += count;
}

static void append_stops(stops *to, const mt_stopped *from, int64_t count) {
    if (count == 0) return;
    to->items = grow(to->items, &to->capacity, to->count + count, (int64_t)sizeof *to->items);
    memcpy(to->items + to->count, from, (size_t)count * sizeof *from);
    to->count += count;
}

/* ---- the owner's side */

void mt_writer_token(mt_writer *w, mt_choice *choice, int32_t token, mt_finish finish) {
    append(&w->given, &(event){.kind = TOKEN, .choice = choice, .token = token, .finish = finish}, 1);
}

void mt_writer_end(mt_writer *w, mt_job *job, int status, const char *message) {
    append(&w->given, &(event){.kind = END, .job = job, .status = status, .message = message}, 1);
}

void mt_writer_step(mt_writer *w, double seconds) {
    append(&w->given, &(event){.kind = STEP, .seconds = seconds}, 1);
}

void mt_writer_state(mt_writer *w, const mt_gauges *gauges) {
    append(&w->given, &(event){.kind = STATE, .gauges = *gauges}, 1);
}

bool mt_writer_flush(mt_writer *w, bool waits) {
    waits |= w->given.count > MOST_EVENTS;
    if (waits)
        pthread_mutex_lock(&w->lock);
    else if (pthread_mutex_trylock(&w->lock) != 0)
        return false;
    while (w->box.count > MOST_EVENTS) pthread_cond_wait(&w->space, &w->lock);
    append(&w->box, w->given.items, w->given.count);
    w->given.count = 0;
    stops before = w->taken;
    w->taken = w->stopped, w->stopped = before, w->stopped.count = 0;
    pthread_cond_signal(&w->arrival);
    pthread_mutex_unlock(&w->lock);
    return true;
}

const mt_stopped *mt_writer_stopped(const mt_writer *w, int64_t *count) {
    *count = w->taken.count;
    return w->taken.items;
}

/* ---- the writer's side */

/* The owner is to end a choice, or all of a job's. */
static void stop(mt_writer *w, const mt_job *job, int64_t index) {
    append_stops(&w->found, &(mt_stopped){job->number, index}, 1);
}

static void take_token(mt_writer *w, const event *e) {
    mt_job *job = e->choice->job;
    bool first = job->first == 0;
    if (job->is_over) return;
    if (mt_job_advance(e->choice, e->token, e->finish) && e->finish == MT_UNFINISHED) stop(w, job, e->choice->index);
    if (first && job->first > 0) mt_counters_time(w->counters, MT_LATENCY_FIRST, job->first - job->arrived);
    job->has_news = true;
}

/* Sends what a job has; a client that does not read ends it. */
static void answer(mt_writer *w, mt_job *job) {
    if (!job->has_news) return;
    job->has_news = false;
    mt_job_answer(job);
    if (job->is_over && job->num_finished < job->num_choices) stop(w, job, -1);
}

static void end_job(mt_writer *w, mt_job *job, int status, const char *message) {
    bool gone = mt_exchange_is_gone(job->exchange), done = job->num_finished == job->num_choices;
    if (done || gone) // answered before its owner knew, or nobody reads
        status = gone ? 499 : 200;
    else if (message)
        mt_job_fail(job, status, message);
    else
        status = 499;
    mt_counters_request(w->counters, job->request.is_chat ? "/v1/chat/completions" : "/v1/completions", status);
    mt_counters_tokens(w->counters, job->prompt_tokens, job->new_tokens);
    mt_counters_time(w->counters, MT_LATENCY_REQUEST, mt_time() - job->arrived);
    mt_job_close(job);
}

/* Writes the events of a step: all tokens first, so that a job answers once. */
static void write_step(mt_writer *w, const event *events, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (events[i].kind == TOKEN) take_token(w, &events[i]);
    for (const event *e = events; e < events + count; e++) {
        if (e->kind == TOKEN) answer(w, e->choice->job);
        if (e->kind == END) {
            if (e->job->began > 0) mt_counters_time(w->counters, MT_LATENCY_QUEUE, e->job->began - e->job->arrived);
            end_job(w, e->job, e->status, e->message);
        }
        if (e->kind == STEP) mt_counters_time(w->counters, MT_LATENCY_STEP, e->seconds);
        if (e->kind == STATE) mt_counters_state(w->counters, &e->gauges);
    }
}

/* Step by step, as a client sees them, also where several have come at once. */
static void write_all(mt_writer *w) {
    const event *events = w->work.items;
    for (int64_t from = 0, to; from < w->work.count; from = to) {
        for (to = from + 1; to < w->work.count && events[to].kind != STEP;) to++;
        write_step(w, events + from, to - from);
    }
    w->work.count = 0;
}

static void *run(void *context) {
    mt_writer *w = context;
    pthread_mutex_lock(&w->lock);
    for (;;) {
        append_stops(&w->stopped, w->found.items, w->found.count);
        w->found.count = 0;
        while (w->box.count == 0 && !w->is_closing) pthread_cond_wait(&w->arrival, &w->lock);
        if (w->box.count == 0) break;
        events done = w->work;
        w->work = w->box, w->box = done;
        pthread_cond_signal(&w->space);
        pthread_mutex_unlock(&w->lock);
        write_all(w);
        pthread_mutex_lock(&w->lock);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* ---- both */

mt_writer *mt_writer_open(mt_counters *counters, mt_error *error) {
    mt_writer *w = mt_calloc(sizeof *w);
    w->counters = counters;
    pthread_mutex_init(&w->lock, NULL), pthread_cond_init(&w->arrival, NULL), pthread_cond_init(&w->space, NULL);
    if (pthread_create(&w->thread, NULL, run, w) == 0) return w;
    mt_error_set(error, "--serve: no thread can be started; raise the limit of threads");
    free(w);
    return NULL;
}

void mt_writer_close(mt_writer *w) {
    if (!w) return;
    mt_writer_flush(w, true);
    pthread_mutex_lock(&w->lock);
    w->is_closing = true;
    pthread_cond_signal(&w->arrival);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    pthread_mutex_destroy(&w->lock), pthread_cond_destroy(&w->arrival), pthread_cond_destroy(&w->space);
    free(w->given.items), free(w->work.items), free(w->box.items);
    free(w->taken.items), free(w->found.items), free(w->stopped.items);
    free(w);
}
