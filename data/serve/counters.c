/* counters.c: what a server has done, as text for Prometheus. */
#include "counters.h"

#include "../tokens/tokenizer_vocab.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 14, MAX_ENDINGS = 64 };

static const double bounds[BUCKETS] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60};

static const struct {
    const char *name, *help;
} latencies[MT_NUM_LATENCIES] = {
    [MT_LATENCY_QUEUE] = {"megatron_queue_seconds", "From the arrival of a request to its first step."},
    [MT_LATENCY_FIRST] = {"megatron_first_token_seconds", "From the arrival of a request to its first token."},
    [MT_LATENCY_REQUEST] = {"megatron_request_seconds", "From the arrival of a request to its end."},
    [MT_LATENCY_STEP] = {"megatron_step_seconds", "Of a step: a forward of the batch and its tokens."},
};

typedef struct histogram {
    int64_t counts[BUCKETS + 1];
    double sum;
} histogram;

struct mt_counters {
    pthread_mutex_t lock;
    histogram times[MT_NUM_LATENCIES];
    struct {
        const char *endpoint;
        int status;
        int64_t count;
    } endings[MAX_ENDINGS];
    int64_t num_endings, prompt_tokens, generated_tokens;
    mt_gauges state;
};

mt_counters *mt_counters_open(void) {
    mt_counters *m = mt_calloc(sizeof *m);
    pthread_mutex_init(&m->lock, NULL);
    return m;
}

void mt_counters_close(mt_counters *m) {
    if (!m) return;
    pthread_mutex_destroy(&m->lock);
    free(m);
}

void mt_counters_time(mt_counters *m, mt_latency latency, double seconds) {
    int at = 0;
    while (at < BUCKETS && seconds > bounds[at]) at++;
    pthread_mutex_lock(&m->lock);
    m->times[latency].counts[at]++, m->times[latency].sum += seconds;
    pthread_mutex_unlock(&m->lock);
}

void mt_counters_request(mt_counters *m, const char *endpoint, int status) {
    int64_t i = 0;
    pthread_mutex_lock(&m->lock);
    while (i < m->num_endings && (m->endings[i].status != status || strcmp(m->endings[i].endpoint, endpoint) != 0)) i++;
    MT_CHECK(i < MAX_ENDINGS);
    m->endings[i].endpoint = endpoint, m->endings[i].status = status, m->endings[i].count++;
    m->num_endings = mt_max(m->num_endings, i + 1);
    pthread_mutex_unlock(&m->lock);
}

void mt_counters_tokens(mt_counters *m, int64_t prompt, int64_t generated) {
    pthread_mutex_lock(&m->lock);
    m->prompt_tokens += prompt, m->generated_tokens += generated;
    pthread_mutex_unlock(&m->lock);
}

void mt_counters_state(mt_counters *m, const mt_gauges *gauges) {
    pthread_mutex_lock(&m->lock);
    m->state = *gauges;
    pthread_mutex_unlock(&m->lock);
}

__attribute__((format(printf, 2, 3))) static void print(mt_text *text, const char *format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    int bytes = vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    mt_text_append(text, line, bytes);
}

static void print_head(mt_text *text, const char *name, const char *type, const char *help) {
    print(text, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void print_number(mt_text *text, const char *name, const char *type, const char *help, int64_t value) {
    print_head(text, name, type, help);
    print(text, "%s %lld\n", name, (long long)value);
}

static void print_histogram(mt_text *text, const histogram *h, const char *name, const char *help) {
    int64_t count = 0;
    print_head(text, name, "histogram", help);
    for (int i = 0; i < BUCKETS; i++) {
        count += h->counts[i];
        print(text, "%s_bucket{le=\"%g\"} %lld\n", name, bounds[i], (long long)count);
    }
    count += h->counts[BUCKETS];
    print(text, "%s_bucket{le=\"+Inf\"} %lld\n%s_sum %.9g\n%s_count %lld\n", name, (long long)count, name, h->sum, name,
          (long long)count);
}

void mt_counters_print(mt_counters *m, mt_text *text) {
    static const char gauge[] = "gauge", counter[] = "counter";
    pthread_mutex_lock(&m->lock);
    const mt_gauges *s = &m->state;
    print_head(text, "megatron_requests_total", counter, "Requests that have ended, by the status of HTTP.");
    for (int64_t i = 0; i < m->num_endings; i++)
        print(text, "megatron_requests_total{endpoint=\"%s\",status=\"%d\"} %lld\n", m->endings[i].endpoint,
              m->endings[i].status, (long long)m->endings[i].count);
    print_number(text, "megatron_prompt_tokens_total", counter, "Tokens of prompts.", m->prompt_tokens);
    print_number(text, "megatron_generated_tokens_total", counter, "New tokens.", m->generated_tokens);
    print_number(text, "megatron_drafted_tokens_total", counter, "Drafts that the model has checked.",
                 s->drafted_tokens);
    print_number(text, "megatron_accepted_tokens_total", counter, "Drafts that were accepted.", s->accepted_tokens);
    print_number(text, "megatron_requests_running", gauge, "Requests in the batch.", s->running_requests);
    print_number(text, "megatron_requests_waiting", gauge, "Requests in the queue.", s->waiting_requests);
    print_number(text, "megatron_sequences_running", gauge, "Sequences in the batch.", s->running_sequences);
    print_number(text, "megatron_cache_pages", gauge, "Pages of keys and values.", s->pages);
    print_number(text, "megatron_cache_pages_used", gauge, "Pages that hold keys and values.", s->used_pages);
    print_number(text, "megatron_connections", gauge, "Connections that are open.", s->connections);
    for (int i = 0; i < MT_NUM_LATENCIES; i++)
        print_histogram(text, &m->times[i], latencies[i].name, latencies[i].help);
    pthread_mutex_unlock(&m->lock);
}
