/* serve.c: a model behind HTTP: the routes, the queue, and the loop of steps. */
#include "serve.h"

#include "../base/signals.h"
#include "../models/special_tokens.h"
#include "../options/option_rules.h"
#include "../options/option_table.h"
#include "../report/report.h"
#include "../run/picture_prompts.h"
#include "../tokens/tokenizer_encode.h"
#include "../tokens/tokenizer_vocab.h"
#include "adapters.h"
#include "counters.h"
#include "job.h"
#include "pace.h"
#include "writer.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    MAX_CHOICES = 128,      // of a request
    CONTEXT = 8192,         // where no --inference-max-seq-length is given
    CACHE_TOKENS = 65536,   // where no --kv-cache-tokens is given
    VIEWED_BYTES = 1 << 25, // of logits of prompts in a step, for scores
    MAX_KEY_BYTES = 4096,
    SECONDS_TO_READ = 30,       // for a request to arrive
    WAIT_NANOSECONDS = 50000000 // until signals and clients are looked at again
};

typedef enum phase { LOADING, SERVING, ENDING } phase;

typedef struct server {
    mt_inference *run;
    mt_http *http;
    mt_counters *counters;
    mt_service service;
    mt_serve_adapters adapters;
    int32_t turn_end; // ends a response to a conversation; -1: none
    char *address, *key;
    int64_t created;
    mt_engine *engine;
    mt_writer *writer;
    mt_job **running; // jobs whose choices the engine has
    int64_t num_running, running_capacity;
    int64_t max_sequences;
    mt_pace pace;
    double heard_at; // when the other ranks last heard from this one
    char late[160];  // the sentences of 504 and 500
    mt_error failure;
    /* shared with the threads of HTTP, under the lock */
    pthread_mutex_t lock, chat_lock;
    pthread_cond_t arrival;
    _Atomic phase phase;         // also read without the lock
    mt_job *first, *last;        // the queue
    _Atomic int64_t num_waiting; // in it, or about to be; also read without the lock
    int64_t num_jobs;
} server;

/* ---- the queue */

/* A place in the queue for a job, with its number; or a refusal. */
static int64_t reserve(server *s, mt_request_error *refusal) {
    int64_t number = -1;
    pthread_mutex_lock(&s->lock);
    if (s->phase == ENDING) {
        mt_refuse(refusal, 503, NULL, "the server is ending; ask another one");
    } else if (s->num_waiting >= s->run->options.serve_queue) {
        mt_refuse(refusal, 429, NULL, "%lld requests wait already; try again later", (long long)s->num_waiting);
    } else {
        s->num_waiting++;
        number = s->num_jobs++;
    }
    pthread_mutex_unlock(&s->lock);
    return number;
}

/* Adds a job; or refuses it. The job is made between, as the text of a long prompt takes a while. */
static int enqueue(server *s, mt_exchange *exchange, mt_request *request, mt_request_error *refusal) {
    int64_t number = reserve(s, refusal);
    if (number < 0) return -1;
    if (!request->has_seed) request->sampling.seed += (uint64_t)number;
    mt_job *job = mt_job_open(exchange, request, &s->service, number);
    pthread_mutex_lock(&s->lock);
    if (s->last)
        s->last->next = job;
    else
        s->first = job;
    s->last = job;
    pthread_cond_signal(&s->arrival);
    pthread_mutex_unlock(&s->lock);
    return 0;
}

/* Takes out the first job that `wanted` chooses; under the lock. */
static mt_job *dequeue(server *s, bool (*wanted)(const server *s, const mt_job *job)) {
    mt_job *before = NULL;
    for (mt_job *job = s->first; job; before = job, job = job->next) {
        if (!wanted(s, job)) continue;
        if (before)
            before->next = job->next;
        else
            s->first = job->next;
        if (s->last == job) s->last = before;
        job->next = NULL;
        s->num_waiting--;
        return job;
    }
    return NULL;
}

/* ---- answers of the threads of HTTP */

static int answer_json(mt_exchange *x, json_t *root) {
    char *text = json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(9));
    json_decref(root);
    mt_exchange_answer(x, 200, "application/json", text, (int64_t)strlen(text));
    free(text);
    return 200;
}

static int answer_refusal(mt_exchange *x, const mt_request_error *refusal) {
    mt_exchange_refuse(x, refusal->status, refusal->error.text, refusal->parameter);
    return refusal->status;
}

/* A route answers and returns the status of HTTP; 0: the answer is a job's. */
typedef int route_function(server *s, mt_exchange *x);

static int get_health(server *s, mt_exchange *x) {
    phase phase = s->phase;
    if (phase == SERVING) return answer_json(x, json_pack("{s:s}", "status", "ok"));
    mt_exchange_refuse(x, 503, phase == LOADING ? "the model is being loaded" : "the server is ending", NULL);
    return 503;
}

/* The base, 0, or an adapter. */
static json_t *model_json(const server *s, int64_t adapter) {
    json_t *model = json_object();
    mt_json_set_string(model, "id", adapter > 0 ? s->adapters.names.items[adapter - 1] : s->service.name);
    mt_json_set_string(model, "object", "model");
    mt_json_set_int(model, "created", s->created);
    mt_json_set_string(model, "owned_by", "megatron.c");
    mt_json_set_int(model, "max_model_len", s->service.context);
    json_t *inputs = json_pack("[s]", "text"); // as OpenRouter and vLLM's clients name them
    if (s->service.images) json_array_append_new(inputs, json_string("image"));
    json_object_set_new(model, "input_modalities", inputs);
    if (adapter > 0) mt_json_set_string(model, "parent", s->service.name);
    return model;
}

static int get_models(server *s, mt_exchange *x) {
    json_t *list = json_array(), *root = json_object();
    for (int64_t i = 0; i <= s->adapters.names.count; i++) json_array_append_new(list, model_json(s, i));
    mt_json_set_string(root, "object", "list");
    json_object_set_new(root, "data", list);
    return answer_json(x, root);
}

static int get_model(server *s, mt_exchange *x) {
    int64_t adapter = mt_service_find(&s->service, mt_exchange_path(x) + strlen("/v1/models/"));
    if (adapter >= 0) return answer_json(x, model_json(s, adapter));
    mt_exchange_refuse(x, 404, "this model is not served here; /v1/models lists what is", "model");
    return 404;
}

static int get_metrics(server *s, mt_exchange *x) {
    mt_text text = {0};
    mt_counters_print(s->counters, &text);
    mt_exchange_answer(x, 200, "text/plain; version=0.0.4", text.data, text.bytes);
    free(text.data);
    return 200;
}

static const char page[] =
#if __has_include("data/serve/page_text.h") // page.html: make writes it into its build folder
#include "data/serve/page_text.h"
#else
    "This build has no page; build it with make.\n"
#endif
    ;

static int get_page(server *s, mt_exchange *x) {
    (void)s;
    mt_exchange_answer(x, 200, "text/html; charset=utf-8", page, sizeof page - 1);
    return 200;
}

static int post_request(server *s, mt_exchange *x, bool is_chat) {
    mt_request_error refusal;
    mt_request request;
    int64_t bytes;
    const char *body = mt_exchange_body(x, &bytes);
    int status = mt_request_read(&request, is_chat, body, bytes, &s->service, &refusal);
    if (status == 0) status = enqueue(s, x, &request, &refusal);
    if (status == 0) return 0;
    mt_request_free(&request);
    return answer_refusal(x, &refusal);
}

static int post_completion(server *s, mt_exchange *x) {
    return post_request(s, x, false);
}

static int post_chat(server *s, mt_exchange *x) {
    return post_request(s, x, true);
}

static int post_tokenize(server *s, mt_exchange *x) {
    mt_request_error refusal;
    mt_ids ids = {0};
    int64_t bytes;
    const char *body = mt_exchange_body(x, &bytes);
    int status = mt_request_read_tokenize(&ids, body, bytes, &s->service, &refusal);
    if (status != 0) {
        free(ids.data);
        return answer_refusal(x, &refusal);
    }
    json_t *root = json_object(), *tokens = json_array();
    for (int64_t i = 0; i < ids.count; i++) json_array_append_new(tokens, json_integer(ids.data[i]));
    mt_json_set_int(root, "count", ids.count);
    mt_json_set_int(root, "max_model_len", s->service.context);
    json_object_set_new(root, "tokens", tokens);
    free(ids.data);
    return answer_json(x, root);
}

static const struct {
    const char *method, *path;
    bool is_open;  // needs no key
    bool is_early; // answers while the model is loaded
    route_function *answer;
} routes[] = {{"GET", "/", true, true, get_page},
              {"GET", "/health", true, true, get_health},
              {"GET", "/metrics", false, true, get_metrics},
              {"GET", "/v1/models", false, false, get_models},
              {"GET", "/v1/models/", false, false, get_model}, // with a name behind it
              {"POST", "/v1/completions", false, false, post_completion},
              {"POST", "/v1/chat/completions", false, false, post_chat},
              {"POST", "/tokenize", false, false, post_tokenize}};
enum { NUM_ROUTES = sizeof routes / sizeof *routes };

static bool path_is(const char *path, const char *route) {
    size_t bytes = strlen(route);
    bool is_beginning = bytes > 1 && route[bytes - 1] == '/';
    return is_beginning ? strncmp(path, route, bytes) == 0 && path[bytes] : strcmp(path, route) == 0;
}

/* The route of a path. -1: the path is unknown; -2: it has other methods. */
static int find_route(const char *method, const char *path) {
    int found = -1;
    for (int i = 0; i < NUM_ROUTES; i++) {
        if (!path_is(path, routes[i].path)) continue;
        if (strcmp(method, routes[i].method) == 0) return i;
        if (strcmp(method, "HEAD") == 0 && strcmp(routes[i].method, "GET") == 0) return i;
        found = -2;
    }
    return found;
}

static bool path_is_open(const char *path) {
    for (int i = 0; i < NUM_ROUTES; i++)
        if (path_is(path, routes[i].path)) return routes[i].is_open;
    return false;
}

/* The receiver of all requests. */
static void receive(void *context, mt_exchange *x) {
    server *s = context;
    int route = find_route(mt_exchange_method(x), mt_exchange_path(x)), status;
    bool loading = s->phase == LOADING;
    if (route == -1) {
        mt_exchange_refuse(x, status = 404, "there is nothing at this path; /v1/completions continues texts", NULL);
    } else if (route == -2) {
        mt_exchange_refuse(x, status = 405, "this path is not for this method; GET reads, POST asks", NULL);
    } else if (loading && !routes[route].is_early) {
        mt_exchange_refuse(x, status = 503, "the model is being loaded", NULL);
    } else {
        status = routes[route].answer(s, x);
    }
    if (status == 0) return; // the job releases it
    mt_counters_request(s->counters, route < 0 ? "none" : routes[route].path, status);
    mt_exchange_release(x);
}

/* ---- the loop */

static bool is_late(const server *s, const mt_job *job) {
    int64_t seconds = s->run->options.serve_timeout;
    return seconds > 0 && mt_time() - job->arrived > (double)seconds;
}

static bool is_lost(const server *s, const mt_job *job) {
    return is_late(s, job) || mt_exchange_is_gone(job->exchange);
}

/* Ends a job that nobody waits for, or that took too long; its choices are no longer in the engine. */
static void end_lost(server *s, mt_job *job) {
    bool gone = mt_exchange_is_gone(job->exchange);
    mt_writer_end(s->writer, job, gone ? 499 : 504, gone ? NULL : s->late);
}

/* True if the batch has room for a job, or is empty. */
static bool has_room(const server *s, const mt_job *job) {
    int64_t count = 0;
    for (int64_t i = 0; i < s->num_running; i++) count += s->running[i]->num_live;
    return job == s->first && (count == 0 || count + job->num_choices <= s->max_sequences);
}

/* Locks the queue. False: streams run, and must not wait for the thread that has the lock. */
static bool lock_queue(server *s) {
    if (s->num_running > 0) return pthread_mutex_trylock(&s->lock) == 0;
    return pthread_mutex_lock(&s->lock) == 0;
}

/* Takes jobs from the queue into the batch, in their order; drops lost ones. */
static void admit(server *s) {
    while (s->num_waiting > 0 && lock_queue(s)) {
        mt_job *lost = dequeue(s, is_lost), *job = lost ? NULL : dequeue(s, has_room);
        pthread_mutex_unlock(&s->lock);
        if (lost) {
            end_lost(s, lost);
        } else if (job) {
            if (s->num_running == s->running_capacity) {
                s->running_capacity = mt_max(16, 2 * s->running_capacity);
                s->running = mt_realloc(s->running, s->running_capacity * (int64_t)sizeof(mt_job *));
            }
            s->running[s->num_running++] = job;
            mt_job_begin(job, s->engine);
        } else {
            return;
        }
    }
}

/* A choice has ended; at `index` of the engine's list, unless it ended there by itself: -1. */
static void end_choice(const server *s, mt_choice *choice, int64_t index) {
    if (!choice->is_live) return;
    choice->is_live = false, choice->job->num_live--;
    if (index >= 0) mt_engine_end(s->engine, index);
}

/* Ends a job's choices in the engine: the one with an index, or all: -1. */
static void leave_engine(const server *s, const mt_job *job, int64_t which) {
    int64_t count;
    const mt_sequence *sequences = mt_engine_sequences(s->engine, &count);
    for (int64_t i = 0; i < count; i++) {
        mt_choice *choice = mt_engine_owner(s->engine, i);
        if (choice && choice->job == job && (which < 0 || choice->index == which))
            end_choice(s, choice, sequences[i].finish == MT_UNFINISHED ? i : -1);
    }
}

/* Gives the new tokens of a step to the writer. */
static void give_tokens(server *s) {
    int64_t count;
    const mt_sequence *sequences = mt_engine_sequences(s->engine, &count);
    for (int64_t i = 0; i < count; i++) {
        const mt_sequence *sequence = &sequences[i];
        mt_choice *choice = mt_engine_owner(s->engine, i);
        if (!choice || !choice->is_live) continue;
        bool has_new = sequence->num_tokens > choice->seen;
        if (!has_new && sequence->finish == MT_UNFINISHED) continue; // its prompt is read
        mt_finish finish = has_new ? MT_UNFINISHED : sequence->finish;
        if (!has_new) mt_writer_token(s->writer, choice, -1, finish);
        for (; choice->seen < sequence->num_tokens && finish == MT_UNFINISHED; choice->seen++) { // drafts: several
            int32_t token = sequence->tokens[choice->seen];
            bool turn_ends = choice->job->request.is_chat && token == s->turn_end;
            if (choice->seen + 1 == sequence->num_tokens) finish = sequence->finish;
            if (turn_ends) finish = MT_FINISH_STOP;
            mt_writer_token(s->writer, choice, token, finish);
        }
        if (finish != MT_UNFINISHED) end_choice(s, choice, sequence->finish == MT_UNFINISHED ? i : -1);
    }
}

/* Ends the choices that the writer found a stop string in, or whose client does not read. */
static void end_stopped(server *s) {
    int64_t count;
    const mt_stopped *stopped = mt_writer_stopped(s->writer, &count);
    for (int64_t n = 0; n < count; n++)
        for (int64_t i = 0; i < s->num_running; i++)
            if (s->running[i]->number == stopped[n].number) leave_engine(s, s->running[i], stopped[n].index);
}

/* Gives the writer the new tokens of a step, and the jobs that have ended. */
static void deliver(server *s) {
    give_tokens(s);
    int64_t kept = 0;
    for (int64_t i = 0; i < s->num_running; i++) {
        mt_job *job = s->running[i];
        bool lost = job->num_live > 0 && is_lost(s, job);
        if (job->num_live > 0 && !lost) {
            s->running[kept++] = job;
            continue;
        }
        leave_engine(s, job, -1);
        mt_engine_disown(s->engine, job->choices, job->choices + job->num_choices);
        if (lost)
            end_lost(s, job);
        else
            mt_writer_end(s->writer, job, 200, NULL);
    }
    s->num_running = kept;
}

/* Hands the writer all that it is given, with the state. Without a sequence there is time to wait for it. */
static void report(server *s) {
    mt_gauges gauges = {.running_requests = s->num_running, .connections = mt_http_connections(s->http)};
    gauges.waiting_requests = s->num_waiting;
    for (int64_t i = 0; i < s->num_running; i++) gauges.running_sequences += s->running[i]->num_live;
    mt_generator_read_pages(s->run->generator, &gauges.pages, &gauges.used_pages);
    mt_generator_totals totals = mt_generator_read_totals(s->run->generator);
    gauges.drafted_tokens = totals.drafted_tokens, gauges.accepted_tokens = totals.accepted_tokens;
    mt_writer_state(s->writer, &gauges);
    if (mt_writer_flush(s->writer, s->num_running == 0)) end_stopped(s);
}

/* Waits for a job, a signal or a moment. Other ranks, which end after a timeout, hear that this one is alive. */
static void wait_for_job(server *s) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += WAIT_NANOSECONDS;
    if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
    pthread_mutex_lock(&s->lock);
    if (!s->first && s->phase == SERVING) pthread_cond_timedwait(&s->arrival, &s->lock, &until);
    pthread_mutex_unlock(&s->lock);
    int64_t seconds = s->run->options.stack.distributed_timeout_seconds;
    mt_error unused;
    if (mt_time() - s->heard_at < (seconds < 120 ? (double)seconds / 2 : 60)) return;
    s->heard_at = mt_time();
    mt_engine_step(s->engine, &unused);
}

/* True while there is something to do, or may be. */
static bool goes_on(server *s) {
    if (s->num_running > 0 && !mt_stop_requested()) return true;
    pthread_mutex_lock(&s->lock);
    if (mt_stop_requested()) s->phase = ENDING;
    bool result = s->phase == SERVING || s->num_waiting > 0 || s->num_running > 0;
    pthread_mutex_unlock(&s->lock);
    return result;
}

/* A step failed: nobody gets an answer any more. */
static void fail_all(server *s, const mt_error *error) {
    s->failure = *error;
    pthread_mutex_lock(&s->lock);
    s->phase = ENDING;
    pthread_mutex_unlock(&s->lock);
    for (int64_t i = 0; i < s->num_running; i++) mt_writer_end(s->writer, s->running[i], 500, s->failure.text);
    s->num_running = 0;
    while (s->num_waiting > 0) {
        pthread_mutex_lock(&s->lock);
        mt_job *job = dequeue(s, has_room); // the batch is empty
        pthread_mutex_unlock(&s->lock);
        if (job) mt_writer_end(s->writer, job, 500, s->failure.text);
    }
}

/* The work on prompts that the next step may do. */
static void limit_prefill(server *s) {
    int64_t count;
    const mt_sequence *sequences = mt_engine_sequences(s->engine, &count);
    mt_streams streams = mt_generator_streams(s->run->generator, sequences, count);
    mt_prefill limit = mt_pace_next(&s->pace, &streams);
    mt_engine_limit_prefill(s->engine, &limit);
}

/* Streams wait for a whole turn of the loop. */
static int run_loop(server *s, mt_error *error) {
    while (goes_on(s)) {
        double start = mt_time();
        admit(s);
        report(s);
        if (s->num_running == 0) {
            wait_for_job(s);
            continue;
        }
        limit_prefill(s);
        double step = s->heard_at = mt_time();
        if (mt_engine_step(s->engine, error) < 0) {
            fail_all(s, error);
            return -1;
        }
        mt_writer_step(s->writer, mt_time() - step);
        deliver(s);
        mt_prefill read = mt_generator_read_prefill(s->run->generator);
        mt_pace_note(&s->pace, &read, mt_time() - start);
    }
    return 0;
}

/* ---- the beginning */

int mt_serve_parse_place(const char *text, char **address, int64_t *port, mt_error *error) {
    const char *colon = strrchr(text, ':'), *number = colon ? colon + 1 : text;
    char *end;
    errno = 0;
    long long value = strtoll(number, &end, 10);
    bool bracket = *text == '[' && colon && colon > text + 1 && colon[-1] == ']';
    size_t bytes = !colon ? 0 : bracket ? (size_t)(colon - text) - 2 : (size_t)(colon - text);
    if (!isdigit((unsigned char)*number) || *end || errno != 0 || value > 65535 || (colon && bytes == 0) ||
        (!bracket && colon && memchr(text, ':', bytes)))
        return mt_error_set(error, "--serve %.100s: expects [ADDRESS:]PORT, such as 8000, 0.0.0.0:8000 or [::1]:8000",
                            text);
    *address = colon ? strndup(text + bracket, bytes) : strdup("127.0.0.1");
    *port = value;
    return 0;
}

/* The first line of --api-key. */
static int read_key(server *s, mt_error *error) {
    int64_t bytes;
    const char *path = s->run->options.api_key;
    if (!path) return 0;
    s->key = mt_file_read(path, MAX_KEY_BYTES, &bytes, error);
    if (!s->key) return -1;
    s->key[strcspn(s->key, "\r\n")] = '\0';
    if (*s->key) return 0;
    return mt_error_set(error, "--api-key %s: the first line is empty; it is the key", path);
}

/* The name of the model: that of its folder, if no other is given. */
static char *model_name(const mt_run_options *o) {
    if (o->serve_model_name) return strdup(o->serve_model_name);
    size_t bytes = strlen(o->load);
    while (bytes > 1 && o->load[bytes - 1] == '/') bytes--;
    size_t from = bytes;
    while (from > 0 && o->load[from - 1] != '/') from--;
    return strndup(o->load + from, bytes - from);
}

static bool address_is_local(const char *address) {
    return strncmp(address, "127.", 4) == 0 || strcmp(address, "::1") == 0;
}

/* Opens the port, before the model is loaded: a port in use is known at once. */
static int open_port(server *s, mt_error *error) {
    const mt_run_options *o = &s->run->options;
    mt_http_config config = {.origin = o->serve_cors, .max_body = o->serve_max_body, .receive = receive, .context = s};
    if (mt_serve_parse_place(o->serve, &s->address, &config.port, error) != 0 || read_key(s, error) != 0) return -1;
    config.address = s->address, config.key = s->key, config.is_open = path_is_open;
    config.seconds_to_read = SECONDS_TO_READ;
    if (!s->key && !address_is_local(s->address))
        fprintf(stderr,
                "note: --serve %s: everybody who reaches this address may use the model; --api-key FILE asks "
                "for a key\n",
                o->serve);
    return mt_http_open(&s->http, &config, error);
}

/* The folder's chat template, or another that was chosen. A model without one serves completions alone. */
static void open_chat(server *s) {
    mt_inference *r = s->run;
    const mt_run_options *o = &r->options;
    mt_error *error = &s->service.no_chat;
    s->turn_end = -1;
    if (!r->tokenizer) {
        mt_error_set(error, "there is no tokenizer");
        return;
    }
    int status = mt_chat_open(&r->chat, o->chat_template, r->tokenizer, r->tokenizer_path, error);
    if (status == 0) status = mt_chat_set_variables(r->chat, o->chat_template_kwargs, error);
    if (status == 0) status = mt_chat_prepare(r->chat, error);
    if (status != 0) {
        mt_chat_close(r->chat);
        r->chat = NULL;
        return;
    }
    s->turn_end = mt_chat_end(r->chat);
}

static void describe_service(server *s) {
    const mt_inference *r = s->run;
    const mt_run_options *o = &r->options;
    mt_service *v = &s->service;
    v->adapters = &s->adapters.names, v->tokenizer = r->tokenizer, v->bos = r->bos, v->context = r->context;
    v->vocab_size = o->stack.vocab_size, v->max_choices = MAX_CHOICES;
    v->sampling = (mt_sampling){.temperature = o->stack.temperature, .top_p = o->top_p, .min_p = o->min_p};
    v->sampling.repetition_penalty = o->repetition_penalty, v->sampling.top_k = o->top_k;
    v->sampling.seed = (uint64_t)o->stack.seed;
    v->max_new_tokens = MT_GIVEN(o, max_new_tokens) ? o->max_new_tokens : -1;
    v->chat = r->chat, v->chat_lock = &s->chat_lock, v->images = r->takes_pictures ? &r->reader : NULL;
    v->max_image_tokens = mt_min(o->max_image_tokens, r->context);
}

/* The model with a generator for requests of all kinds. */
static void open_generator(mt_inference *r, const mt_serve_adapters *adapters, mt_stops *stops) {
    mt_error error;
    const mt_run_options *o = &r->options;
    const mt_sampling greedy = {.top_p = 1};
    int64_t most = o->inference_max_requests, prefill = o->max_prefill_tokens;
    int64_t drafts = o->num_speculative_tokens, decoded = most * (1 + drafts); // tokens of a decode step
    mt_model_plan plan = {.page_rows = o->inference_dynamic_batching_block_size, .max_tokens = decoded + prefill};
    int64_t cache = o->kv_cache_tokens > 0 ? o->kv_cache_tokens : mt_max(CACHE_TOKENS, r->context);
    int64_t viewed = mt_clamp(VIEWED_BYTES / (o->stack.vocab_size * 4), 1, prefill);
    mt_inference_plan_pictures(r, &plan);
    plan.num_drafts = drafts;
    mt_plan_generation(&plan, most, r->context, cache);
    plan.max_logits = mt_max(plan.max_logits, decoded + viewed);
    plan.num_adapters = adapters->names.count;
    mt_inference_open_model(r, &plan);
    mt_inference_check(r, mt_serve_adapters_load(adapters, r->model, o, &error), &error);
    r->generator = mt_generator_create_mixed(r->model, &greedy, stops, viewed);
}

static void print_place(const server *s) {
    bool six = strchr(s->address, ':') != NULL;
    fprintf(stderr, "serving %s at http://%s%s%s:%lld\n", s->service.name, six ? "[" : "", s->address, six ? "]" : "",
            (long long)mt_http_port(s->http));
    for (int64_t i = 0; i < s->adapters.names.count; i++)
        fprintf(stderr, "adapter %s: %s, rank %lld\n", s->adapters.names.items[i], s->adapters.folders.items[i],
                (long long)s->adapters.own[i].lora_rank);
    if (!s->run->chat) fprintf(stderr, "note: no /v1/chat/completions: %.1000s\n", s->service.no_chat.text);
}

/* ---- the whole */

static void open_server(server *s, mt_inference *r) {
    mt_error error;
    *s = (server){.run = r, .turn_end = -1, .created = (int64_t)time(NULL)};
    pthread_mutex_init(&s->lock, NULL), pthread_mutex_init(&s->chat_lock, NULL), pthread_cond_init(&s->arrival, NULL);
    s->counters = mt_counters_open();
    s->max_sequences = r->options.inference_max_requests;
    snprintf(s->late, sizeof s->late, "the request took longer than the %lld seconds of --serve-timeout; ask for less",
             (long long)r->options.serve_timeout);
    s->service.name = model_name(&r->options);
    mt_inference_check(r, mt_serve_adapters_open(&s->adapters, &r->options, s->service.name, &error), &error);
    mt_inference_check(r, r->is_first ? open_port(s, &error) : 0, &error);
}

static void close_server(server *s) {
    mt_http_close(s->http);
    mt_counters_close(s->counters);
    mt_serve_adapters_close(&s->adapters);
    free((char *)(uintptr_t)s->service.name);
    free(s->running), free(s->address), free(s->key);
    pthread_mutex_destroy(&s->lock), pthread_mutex_destroy(&s->chat_lock), pthread_cond_destroy(&s->arrival);
}

/* SIGTERM and SIGINT end the loop; a client that closes its connection raises no signal. */
static void hold_signals(const mt_inference *r) {
    bool stops[MT_NUM_SIGNALS] = {[MT_EXIT_SIGTERM] = true, [MT_EXIT_SIGINT] = true};
    const char *graceful = "note: no new requests; those at hand are finished first, another signal ends at once\n",
               *killed = "note: no new requests; those at hand are finished first, as far as mpirun lets: it ends its "
                         "ranks after OMPI_MCA_odls_base_sigkill_timeout seconds (default: 1)\n";
    mt_signals_hold();
    if (r->is_first) mt_signals_note(graceful, killed);
    mt_signals_keep(stops);
    signal(SIGPIPE, SIG_IGN);
}

void mt_serve(mt_inference *r) {
    server s;
    mt_error error;
    mt_stops stops;
    const mt_run_options *o = &r->options;
    int64_t limit = o->inference_max_seq_length > 0 ? o->inference_max_seq_length : CONTEXT;
    if (r->grid.data.size > 1 && o->stack.expert_model_parallel_size == 1)
        mt_inference_check(r,
                           mt_error_set(&error,
                                        "--serve: %d data-parallel ranks would all do the same work; start a server "
                                        "for each, or divide the model (--tensor-model-parallel-size)",
                                        r->grid.data.size),
                           &error);
    hold_signals(r);
    r->context = mt_min(r->context, limit);
    open_server(&s, r);
    mt_inference_check(r, mt_stops_of_options(&stops, o, &error), &error);
    if (stops.count == 0 && r->tokenizer && mt_tokenizer_eod(r->tokenizer) >= 0)
        stops = (mt_stops){.ids = {mt_tokenizer_eod(r->tokenizer)}, .count = 1};
    open_generator(r, &s.adapters, &stops);
    s.engine = mt_engine_open(r->generator, &r->grid);
    s.pace = mt_pace_open(&(mt_prefill){o->max_prefill_tokens, INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX});
    int status;
    if (r->is_first) s.writer = mt_writer_open(s.counters, &error);
    mt_inference_check(r, r->is_first && !s.writer ? -1 : 0, &error);
    if (r->is_first) {
        open_chat(&s);
        describe_service(&s);
        mt_report_inference(r->model, o, r->context, stderr);
        print_place(&s);
        s.phase = SERVING;
        status = run_loop(&s, &error);
        if (status == 0) mt_engine_stop(s.engine);
    } else {
        status = mt_engine_follow(s.engine, &error);
    }
    mt_writer_close(s.writer);
    mt_engine_close(s.engine);
    close_server(&s);
    mt_inference_check(r, status, &error);
}
