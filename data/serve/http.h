/* http.h: the door of the server: HTTP by libmicrohttpd. It reads whole requests, hands them on, and writes answers,
 * whole or as a stream. It knows neither models nor JSON. A build WITHOUT=http refuses mt_http_open. */
#ifndef MT_HTTP_H
#define MT_HTTP_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The server's side of a TCP port. */
typedef struct mt_http mt_http;

/* A request and its answer. It may be answered by any thread, long after its receiver has returned, and lives until the
 * connection and the receiver have both let it go. */
typedef struct mt_exchange mt_exchange;

/* Where requests come from and what they may cost. */
typedef struct mt_http_config {
    const char *address;               // "127.0.0.1", "::1", "0.0.0.0", ...
    int64_t port;                      // 0: a free one
    const char *key;                   // of "Authorization: Bearer KEY"; NULL: everybody may enter
    const char *origin;                // whose pages may call from a browser (CORS); NULL: the server's own alone
    int64_t max_body;                  // bytes of a request; more are answered by 413
    double seconds_to_read;            // a connection may take for a request; then it is closed
    bool (*is_open)(const char *path); // paths that need no key
    void (*receive)(void *context, mt_exchange *exchange); // called by several threads; must release the exchange
    void *context;
} mt_http_config;

/* Opens the port and begins to serve. The strings of `config` must outlive the server. Errors: a build without
 * libmicrohttpd, no address, a port in use. */
int mt_http_open(mt_http **http, const mt_http_config *config, mt_error *error);
int64_t mt_http_port(const mt_http *http);
/* Ends all connections; no exchange must be unanswered. NULL is allowed. */
void mt_http_close(mt_http *http);

/* Connections that are open. */
int64_t mt_http_connections(mt_http *http);

/* The request: method, path without its query, and body. */
const char *mt_exchange_method(const mt_exchange *exchange);
const char *mt_exchange_path(const mt_exchange *exchange);
const char *mt_exchange_body(const mt_exchange *exchange, int64_t *bytes);

/* Answers as a whole. */
void mt_exchange_answer(mt_exchange *exchange, int status, const char *type, const char *text, int64_t bytes);

/* Answers by a stream of 200: begins, adds a part, ends. Parts that a slow client has not read yet are kept; returns
 * the number of their bytes. */
void mt_exchange_begin(mt_exchange *exchange, const char *type);
int64_t mt_exchange_send(mt_exchange *exchange, const char *text, int64_t bytes);
void mt_exchange_end(mt_exchange *exchange);

/* True once the client has closed its connection, or the side that it sends on: nobody waits for the answer. */
bool mt_exchange_is_gone(mt_exchange *exchange);

/* The receiver's last call. An exchange without an answer is then closed. */
void mt_exchange_release(mt_exchange *exchange);

/* The error that a client of this interface expects: {"error": {"message", "type", "param", "code"}}, with the type
 * that belongs to the status. `parameter` NULL: none. Returns the text, to free. */
char *mt_http_error(int status, const char *message, const char *parameter);

/* mt_exchange_answer with mt_http_error. */
void mt_exchange_refuse(mt_exchange *exchange, int status, const char *message, const char *parameter);

/* True if a key is the wanted one. The time depends on the lengths alone. */
bool mt_keys_equal(const char *wanted, const char *given);

#ifdef __cplusplus
}
#endif
#endif
