/* http.c: the door of the server: HTTP by libmicrohttpd. Its threads read requests; a connection whose answer is not
 * ready is suspended and costs nothing; whoever has the answer resumes it. A suspended connection is not watched by
 * libmicrohttpd, so a thread here looks for clients that have gone, and for clients that take too long for a request.
 */
#include "http.h"

#include "../base/file.h"
#include "../tokens/tokenizer.h"
#include "../tokens/tokenizer_vocab.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* ---- errors */

char *mt_http_error(int status, const char *message, const char *parameter) {
    const char *type = "invalid_request_error", *code = NULL;
    bool of_model = status == 404 && parameter && strcmp(parameter, "model") == 0;
    if (status == 401) type = "authentication_error", code = "invalid_api_key";
    if (status == 403) type = "permission_error";
    if (status == 404) type = of_model ? type : "not_found_error", code = of_model ? "model_not_found" : NULL;
    if (status == 429) type = "rate_limit_error", code = "queue_full";
    if (status >= 500) type = "server_error";
    json_t *error = json_object(), *root = json_object();
    json_t *said = json_string(message);
    json_object_set_new(error, "message", said ? said : json_string("the request is not UTF-8"));
    mt_json_set_string(error, "type", type);
    json_object_set_new(error, "param", parameter ? json_string(parameter) : json_null());
    json_object_set_new(error, "code", code ? json_string(code) : json_null());
    json_object_set_new(root, "error", error);
    char *text = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    return text;
}

void mt_exchange_refuse(mt_exchange *exchange, int status, const char *message, const char *parameter) {
    char *text = mt_http_error(status, message, parameter);
    mt_exchange_answer(exchange, status, "application/json", text, (int64_t)strlen(text));
    free(text);
}

bool mt_keys_equal(const char *wanted, const char *given) {
    size_t bytes = strlen(wanted), others = strlen(given);
    unsigned different = bytes != others;
    for (size_t i = 0; i < bytes; i++)
        different |= (unsigned)(unsigned char)wanted[i] ^ (others ? (unsigned)(unsigned char)given[i % others] : 1u);
    return different == 0;
}

#ifdef MT_HAVE_HTTP

#include <arpa/inet.h>
#include <microhttpd.h>
#include <netdb.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    HTTP_THREADS = 4,        // that read requests and write answers
    MAX_CONNECTIONS = 16384, // or less, where the process may open fewer files
    FILES_KEPT = 64,         // of them for other use than connections
    LOOK_MICROSECONDS = 50000,
    SECONDS_TO_SEND = 5, // for last answers, when the server ends
    DRAINED = 4          // times max_body of a request that is too large are read, so that its client sees the answer
};

/* A connection, between two calls of notify_connection. */
typedef struct peer {
    struct peer *next, **link;
    int socket;
    double since;          // the last answer, or the beginning
    mt_exchange *exchange; // the request at hand; NULL: none has begun
    bool is_reading;       // the request is not whole yet
} peer;

struct mt_http {
    mt_http_config config;
    struct MHD_Daemon *daemon;
    int64_t port;
    bool is_local; // the address is that of this machine alone
    pthread_t watcher;
    bool watches;
    pthread_mutex_t lock; // of the list, and of its peers
    peer *peers;
    _Atomic int64_t num_peers; // also read without the lock
    bool ends;
};

struct mt_exchange {
    mt_http *http;
    peer *peer;
    char *method, *path;
    mt_text body;
    pthread_mutex_t lock; // of all below
    int references;
    struct MHD_Connection *connection; // NULL: it has ended
    bool is_suspended;
    atomic_bool is_gone;                   // also read without the lock
    bool is_answered, is_stream, is_ended; // the answer's status and type are known; it has parts; it is whole
    int status;
    char type[64];
    mt_text answer;   // the part that is not sent yet
    bool is_queued;   // given to libmicrohttpd
    bool is_received; // given to the receiver
    /* while the request is read */
    int refusal; // a status; 0: none
    const char *reason;
    int64_t received;
};

/* ---- exchanges */

static void unreference(mt_exchange *x) {
    pthread_mutex_lock(&x->lock);
    bool last = --x->references == 0;
    pthread_mutex_unlock(&x->lock);
    if (!last) return;
    pthread_mutex_destroy(&x->lock);
    free(x->method), free(x->path), free(x->body.data), free(x->answer.data), free(x);
}

/* Continues a suspended connection; under the exchange's lock. */
static void resume(mt_exchange *x) {
    if (!x->is_suspended || !x->connection) return;
    x->is_suspended = false;
    MHD_resume_connection(x->connection);
}

const char *mt_exchange_method(const mt_exchange *x) {
    return x->method;
}

const char *mt_exchange_path(const mt_exchange *x) {
    return x->path;
}

const char *mt_exchange_body(const mt_exchange *x, int64_t *bytes) {
    *bytes = x->body.bytes;
    return x->body.data ? x->body.data : "";
}

/* Sets the head of an answer. False: the client has gone, and nothing is to be sent. */
static bool begin(mt_exchange *x, int status, const char *type) {
    if (x->is_gone) return false;
    MT_CHECK(!x->is_answered);
    x->is_answered = true, x->status = status;
    snprintf(x->type, sizeof x->type, "%s", type);
    return true;
}

void mt_exchange_answer(mt_exchange *x, int status, const char *type, const char *text, int64_t bytes) {
    pthread_mutex_lock(&x->lock);
    if (begin(x, status, type)) {
        mt_text_append(&x->answer, text, bytes);
        x->is_ended = true;
        resume(x);
    }
    pthread_mutex_unlock(&x->lock);
}

void mt_exchange_begin(mt_exchange *x, const char *type) {
    pthread_mutex_lock(&x->lock);
    if (begin(x, 200, type)) {
        x->is_stream = true;
        resume(x);
    }
    pthread_mutex_unlock(&x->lock);
}

int64_t mt_exchange_send(mt_exchange *x, const char *text, int64_t bytes) {
    pthread_mutex_lock(&x->lock);
    if (!x->is_gone) mt_text_append(&x->answer, text, bytes);
    int64_t kept = x->answer.bytes;
    resume(x);
    pthread_mutex_unlock(&x->lock);
    return kept;
}

void mt_exchange_end(mt_exchange *x) {
    pthread_mutex_lock(&x->lock);
    x->is_ended = true;
    resume(x);
    pthread_mutex_unlock(&x->lock);
}

bool mt_exchange_is_gone(mt_exchange *x) {
    return x->is_gone;
}

void mt_exchange_release(mt_exchange *x) {
    pthread_mutex_lock(&x->lock);
    if (!x->is_answered) begin(x, 500, "text/plain");
    x->is_ended = true;
    resume(x);
    pthread_mutex_unlock(&x->lock);
    unreference(x);
}

/* ---- answers */

/* The reader of a stream: what is there, else it suspends the connection until there is more. */
static ssize_t read_stream(void *context, uint64_t position, char *buffer, size_t most) {
    mt_exchange *x = context;
    (void)position;
    pthread_mutex_lock(&x->lock);
    int64_t bytes = mt_min(x->answer.bytes, (int64_t)most);
    ssize_t result = bytes;
    if (bytes > 0) {
        memcpy(buffer, x->answer.data, (size_t)bytes);
        memmove(x->answer.data, x->answer.data + bytes, (size_t)(x->answer.bytes - bytes));
        x->answer.bytes -= bytes;
    } else if (x->is_ended || x->is_gone) {
        result = MHD_CONTENT_READER_END_OF_STREAM;
    } else {
        x->is_suspended = true;
        MHD_suspend_connection(x->connection);
    }
    pthread_mutex_unlock(&x->lock);
    return result;
}

static void end_stream(void *context) {
    unreference(context);
}

static void add_headers(const mt_http *http, struct MHD_Response *response, const mt_exchange *x) {
    MHD_add_response_header(response, "Content-Type", x->type);
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(response, "Cache-Control", "no-store");
    MHD_add_response_header(
        response, "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'");
    if (x->status == 401) MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
    if (x->status == 405) MHD_add_response_header(response, "Allow", "GET, POST");
    if (x->status == 429 || x->status == 503) MHD_add_response_header(response, "Retry-After", "1");
    if (!http->config.origin) return;
    MHD_add_response_header(response, "Access-Control-Allow-Origin", http->config.origin);
    MHD_add_response_header(response, "Vary", "Origin");
    MHD_add_response_header(response, "Access-Control-Allow-Methods", "GET, POST");
    MHD_add_response_header(response, "Access-Control-Allow-Headers", "Authorization, Content-Type");
}

/* Gives an answer to libmicrohttpd. The exchange's lock is not held: the library takes locks of its own, also where it
 * calls read_stream, and end_stream where it fails. */
static enum MHD_Result queue_answer(mt_exchange *x) {
    struct MHD_Response *response;
    pthread_mutex_lock(&x->lock);
    if (x->is_stream) {
        x->references++;
        response = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 1 << 14, read_stream, x, end_stream);
        if (!response) x->references--;
    } else {
        response = MHD_create_response_from_buffer((size_t)x->answer.bytes, x->answer.data, MHD_RESPMEM_MUST_COPY);
    }
    if (response) add_headers(x->http, response, x);
    x->is_queued = response != NULL;
    pthread_mutex_unlock(&x->lock);
    if (!response) return MHD_NO;
    enum MHD_Result result = MHD_queue_response(x->connection, (unsigned)x->status, response);
    MHD_destroy_response(response);
    return result;
}

/* ---- requests */

/* True for a name of this machine, with any port: localhost, [::1], or a number 127.x.y.z. A page elsewhere whose name
 * was made to lead here is refused. */
static bool names_this_machine(const char *host) {
    static const char *const names[] = {"localhost", "[::1]"};
    size_t bytes = strcspn(host, host[0] == '[' ? "]" : ":");
    if (host[0] == '[' && host[bytes] == ']') bytes++;
    if (host[bytes] != '\0' && host[bytes] != ':') return false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (bytes == strlen(names[i]) && strncasecmp(host, names[i], bytes) == 0) return true;
    return strncmp(host, "127.", 4) == 0 && strspn(host, "0123456789.") == bytes;
}

/* True if the page that a browser sends the request for is the server's own, or of the origin that may call. */
static bool origin_may_call(const mt_http *http, const char *origin, const char *host) {
    if (!origin || (http->config.origin && strcmp(origin, http->config.origin) == 0)) return true;
    const char *own = strstr(origin, "://");
    return own && host && strcmp(own + 3, host) == 0;
}

static const char *header(struct MHD_Connection *connection, const char *name) {
    return MHD_lookup_connection_value(connection, MHD_HEADER_KIND, name);
}

static bool encoding_is_plain(const char *encoding) {
    return !encoding || *encoding == '\0' || strcasecmp(encoding, "identity") == 0;
}

static void refuse(mt_exchange *x, int status, const char *reason) {
    if (x->refusal == 0) x->refusal = status, x->reason = reason;
}

/* Refuses a request by its head alone. */
static void check_head(mt_exchange *x, struct MHD_Connection *connection) {
    const mt_http_config *config = &x->http->config;
    const char *host = header(connection, "Host"), *key = header(connection, "Authorization");
    const char *length = header(connection, "Content-Length");
    if (length && (strlen(length) > 18 || atoll(length) > config->max_body))
        refuse(x, 413, "the request's body is larger than this server takes (--serve-max-body); send less at once");
    if (length && header(connection, "Transfer-Encoding"))
        refuse(x, 400, "the request has Content-Length and Transfer-Encoding; send one of them");
    if (!encoding_is_plain(header(connection, "Content-Encoding")))
        refuse(x, 415, "the request's body is compressed; send it without Content-Encoding");
    if (x->http->is_local && host && !names_this_machine(host))
        refuse(x, 403, "the header Host names another machine; call the server by 127.0.0.1 or localhost");
    if (!origin_may_call(x->http, header(connection, "Origin"), host))
        refuse(x, 403, "pages of this origin may not call the server (--serve-cors names one that may)");
    if (!config->key || config->is_open(x->path) || strcmp(x->method, "OPTIONS") == 0) return;
    if (!key || strncmp(key, "Bearer ", 7) != 0 || !mt_keys_equal(config->key, key + 7))
        refuse(x, 401, "the key is missing or wrong; send it as the header Authorization: Bearer KEY");
}

static mt_exchange *begin_exchange(mt_http *http, struct MHD_Connection *connection, const char *path,
                                   const char *method) {
    mt_exchange *x = mt_calloc(sizeof *x);
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    x->http = http, x->connection = connection, x->references = 1;
    x->peer = info ? info->socket_context : NULL;
    x->path = strdup(path), x->method = strdup(method);
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE); // a response that is refused is freed under it
    pthread_mutex_init(&x->lock, &attributes);
    pthread_mutexattr_destroy(&attributes);
    mt_text_append(&x->body, "", 0);
    check_head(x, connection);
    pthread_mutex_lock(&http->lock);
    if (x->peer) x->peer->exchange = x, x->peer->is_reading = true, x->peer->since = mt_time();
    pthread_mutex_unlock(&http->lock);
    return x;
}

/* The whole request is there. */
static void receive(mt_exchange *x) {
    x->is_received = true;
    pthread_mutex_lock(&x->http->lock);
    if (x->peer) x->peer->is_reading = false;
    pthread_mutex_unlock(&x->http->lock);
    if (x->refusal) {
        mt_exchange_refuse(x, x->refusal, x->reason, NULL);
    } else if (strcmp(x->method, "OPTIONS") == 0) {
        mt_exchange_answer(x, 204, "text/plain", "", 0);
    } else {
        pthread_mutex_lock(&x->lock);
        x->references++;
        pthread_mutex_unlock(&x->lock);
        x->http->config.receive(x->http->config.context, x);
    }
}

static enum MHD_Result handle(void *context, struct MHD_Connection *connection, const char *path, const char *method,
                              const char *version, const char *data, size_t *bytes, void **state) {
    mt_http *http = context;
    mt_exchange *x = *state;
    (void)version;
    if (!x) {
        *state = x = begin_exchange(http, connection, path, method);
        if (x->refusal != 413) return MHD_YES;
        receive(x); // before the body, which the client need not send
        return queue_answer(x);
    }
    if (*bytes > 0) {
        x->received += (int64_t)*bytes;
        if (x->received > http->config.max_body)
            refuse(x, 413, "the request's body is larger than this server takes (--serve-max-body); send less at once");
        if (!x->refusal) mt_text_append(&x->body, data, (int64_t)*bytes);
        *bytes = 0;
        return x->received > DRAINED * http->config.max_body ? MHD_NO : MHD_YES;
    }
    if (x->is_queued) return MHD_YES;
    if (!x->is_received) receive(x);
    pthread_mutex_lock(&x->lock);
    bool is_answered = x->is_answered;
    if (!is_answered) {
        x->is_suspended = true;
        MHD_suspend_connection(connection);
    }
    pthread_mutex_unlock(&x->lock);
    return is_answered ? queue_answer(x) : MHD_YES;
}

/* The answer is sent, or the connection has ended. */
static void complete(void *context, struct MHD_Connection *connection, void **state,
                     enum MHD_RequestTerminationCode code) {
    mt_http *http = context;
    mt_exchange *x = *state;
    (void)connection;
    if (!x) return;
    pthread_mutex_lock(&http->lock);
    if (x->peer) x->peer->exchange = NULL, x->peer->is_reading = false, x->peer->since = mt_time();
    pthread_mutex_unlock(&http->lock);
    pthread_mutex_lock(&x->lock);
    x->connection = NULL, x->is_suspended = false;
    if (code != MHD_REQUEST_TERMINATED_COMPLETED_OK) x->is_gone = true;
    pthread_mutex_unlock(&x->lock);
    *state = NULL;
    unreference(x);
}

static void notify_connection(void *context, struct MHD_Connection *connection, void **socket_context,
                              enum MHD_ConnectionNotificationCode code) {
    mt_http *http = context;
    pthread_mutex_lock(&http->lock);
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        peer *p = mt_calloc(sizeof *p);
        p->socket = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
        p->since = mt_time(), p->next = http->peers, p->link = &http->peers;
        if (p->next) p->next->link = &p->next;
        http->peers = *socket_context = p, http->num_peers++;
    } else if (*socket_context) {
        peer *p = *socket_context;
        *p->link = p->next;
        if (p->next) p->next->link = p->link;
        free(p), http->num_peers--;
        *socket_context = NULL;
    }
    pthread_mutex_unlock(&http->lock);
}

int64_t mt_http_connections(mt_http *http) {
    return http->num_peers;
}

/* ---- clients that have gone, or are slow */

/* True if the other side sends nothing more. */
static bool has_left(int socket) {
    char byte;
    ssize_t bytes = recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return bytes == 0 || (bytes < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
}

/* Looks at a connection; under the server's lock, which keeps its socket and its exchange. */
static void look_at(mt_http *http, peer *p) {
    if (p->exchange && !p->is_reading) {
        mt_exchange *x = p->exchange;
        bool left = has_left(p->socket);
        pthread_mutex_lock(&x->lock);
        if (left && x->is_suspended) {
            if (!x->is_answered) begin(x, 500, "text/plain"); // nobody reads it
            x->is_gone = x->is_ended = true;
            resume(x);
        }
        pthread_mutex_unlock(&x->lock);
    } else if (mt_time() - p->since > http->config.seconds_to_read) {
        shutdown(p->socket, SHUT_RDWR);
    }
}

static void *watch(void *context) {
    mt_http *http = context;
    for (;;) {
        usleep(LOOK_MICROSECONDS);
        pthread_mutex_lock(&http->lock);
        bool ends = http->ends;
        for (peer *p = http->peers; p && !ends; p = p->next) look_at(http, p);
        pthread_mutex_unlock(&http->lock);
        if (ends) return NULL;
    }
}

/* ---- the whole */

/* Connections that the process has files for. */
static unsigned most_connections(void) {
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0) return 512;
    if (files.rlim_cur < files.rlim_max) { // as far as the system lets it
        files.rlim_cur = files.rlim_max;
        if (setrlimit(RLIMIT_NOFILE, &files) != 0) getrlimit(RLIMIT_NOFILE, &files);
    }
    int64_t most =
        files.rlim_cur > MAX_CONNECTIONS + FILES_KEPT ? MAX_CONNECTIONS + FILES_KEPT : (int64_t)files.rlim_cur;
    return (unsigned)mt_max(most - FILES_KEPT, HTTP_THREADS);
}

static bool is_loopback(const struct sockaddr *address) {
    if (address->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr) >> 24 == 127;
    return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
}

/* Errors of the library that no answer can say go nowhere: a client's garbage must not fill a log. */
static void say_nothing(void *context, const char *format, va_list arguments) {
    (void)context, (void)format, (void)arguments;
}

static int start(mt_http *http, const struct addrinfo *to, mt_error *error) {
    unsigned flags = MHD_USE_AUTO | MHD_USE_INTERNAL_POLLING_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG;
    if (to->ai_family == AF_INET6) flags |= MHD_USE_IPv6;
    int yes = 1, listening = socket(to->ai_family, to->ai_socktype | SOCK_CLOEXEC, to->ai_protocol);
    struct sockaddr_storage bound;
    socklen_t bytes = sizeof bound;
    if (listening >= 0) setsockopt(listening, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (listening < 0 || bind(listening, to->ai_addr, to->ai_addrlen) != 0 || listen(listening, SOMAXCONN) != 0 ||
        getsockname(listening, (struct sockaddr *)&bound, &bytes) != 0) {
        int status = mt_error_set(error, "--serve: %s port %lld cannot be opened: %s", http->config.address,
                                  (long long)http->config.port, strerror(errno));
        if (listening >= 0) close(listening);
        return status;
    }
    http->is_local = is_loopback(to->ai_addr);
    http->port = ntohs(bound.ss_family == AF_INET ? ((struct sockaddr_in *)(void *)&bound)->sin_port
                                                  : ((struct sockaddr_in6 *)(void *)&bound)->sin6_port);
    http->daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, handle, http, MHD_OPTION_EXTERNAL_LOGGER, say_nothing, NULL, MHD_OPTION_LISTEN_SOCKET,
        listening, MHD_OPTION_THREAD_POOL_SIZE, (unsigned)HTTP_THREADS, MHD_OPTION_CONNECTION_LIMIT, most_connections(),
        MHD_OPTION_NOTIFY_COMPLETED, complete, http, MHD_OPTION_NOTIFY_CONNECTION, notify_connection, http,
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)mt_max((int64_t)http->config.seconds_to_read, 1), MHD_OPTION_END);
    if (http->daemon) return 0;
    close(listening);
    return mt_error_set(error, "--serve: libmicrohttpd does not start: %s", strerror(errno));
}

int mt_http_open(mt_http **out, const mt_http_config *config, mt_error *error) {
    mt_http *http = mt_calloc(sizeof *http);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_PASSIVE}, *found = NULL;
    char port[24];
    http->config = *config;
    pthread_mutex_init(&http->lock, NULL);
    snprintf(port, sizeof port, "%lld", (long long)config->port);
    int status = 0;
    if (getaddrinfo(config->address, port, &hints, &found) != 0)
        status = mt_error_set(error, "--serve: \"%.100s\" is no address of IPv4 or IPv6; 127.0.0.1 is this machine",
                              config->address);
    if (status == 0) status = start(http, found, error);
    if (found) freeaddrinfo(found);
    if (status == 0 && pthread_create(&http->watcher, NULL, watch, http) != 0)
        status = mt_error_set(error, "--serve: no thread can be started; raise the limit of threads");
    else
        http->watches = status == 0;
    if (status != 0) {
        mt_http_close(http);
        return -1;
    }
    *out = http;
    return 0;
}

int64_t mt_http_port(const mt_http *http) {
    return http->port;
}

/* True if an answer is not sent yet. */
static bool is_busy(mt_http *http) {
    bool busy = false;
    pthread_mutex_lock(&http->lock);
    for (peer *p = http->peers; p; p = p->next) busy |= p->exchange != NULL;
    pthread_mutex_unlock(&http->lock);
    return busy;
}

void mt_http_close(mt_http *http) {
    if (!http) return;
    double start = mt_time();
    while (http->daemon && is_busy(http) && mt_time() - start < SECONDS_TO_SEND) usleep(1000);
    pthread_mutex_lock(&http->lock);
    http->ends = true;
    pthread_mutex_unlock(&http->lock);
    if (http->watches) pthread_join(http->watcher, NULL);
    if (http->daemon) MHD_stop_daemon(http->daemon);
    pthread_mutex_destroy(&http->lock);
    free(http);
}

#else

int mt_http_open(mt_http **http, const mt_http_config *config, mt_error *error) {
    (void)http, (void)config;
    return mt_error_set(error, "--serve: this build has no libmicrohttpd; make deps installs it, then make builds "
                               "with it");
}

int64_t mt_http_port(const mt_http *http) {
    (void)http;
    return -1;
}

void mt_http_close(mt_http *http) {
    (void)http;
}

int64_t mt_http_connections(mt_http *http) {
    (void)http;
    return 0;
}

const char *mt_exchange_method(const mt_exchange *exchange) {
    (void)exchange;
    return "";
}

const char *mt_exchange_path(const mt_exchange *exchange) {
    (void)exchange;
    return "";
}

const char *mt_exchange_body(const mt_exchange *exchange, int64_t *bytes) {
    (void)exchange;
    *bytes = 0;
    return "";
}

void mt_exchange_answer(mt_exchange *exchange, int status, const char *type, const char *text, int64_t bytes) {
    (void)exchange, (void)status, (void)type, (void)text, (void)bytes;
}

void mt_exchange_begin(mt_exchange *exchange, const char *type) {
    (void)exchange, (void)type;
}

int64_t mt_exchange_send(mt_exchange *exchange, const char *text, int64_t bytes) {
    (void)exchange, (void)text, (void)bytes;
    return 0;
}

void mt_exchange_end(mt_exchange *exchange) {
    (void)exchange;
}

bool mt_exchange_is_gone(mt_exchange *exchange) {
    (void)exchange;
    return true;
}

void mt_exchange_release(mt_exchange *exchange) {
    (void)exchange;
}

#endif
