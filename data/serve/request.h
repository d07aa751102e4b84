/* request.h: what a client asks for: bodies of JSON, checked whole, with their prompts as tokens. Errors name the
 * field. */
#ifndef MT_REQUEST_H
#define MT_REQUEST_H

#include "../base/file.h"
#include "../models/text_images.h"
#include "../tokens/chat.h"
#include "../tokens/tokenizer.h"

#include <pthread.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The model as requests see it: the same for all of them. */
typedef struct mt_service {
    const char *name;              // of the model
    const mt_strings *adapters;    // names of its adapters, each a model too; NULL: none
    const mt_tokenizer *tokenizer; // NULL: prompts are tokens, and answers have no text
    int32_t bos;                   // begins texts; -1: none
    int64_t context, vocab_size;
    int64_t max_choices;    // sequences that one request may ask for
    mt_sampling sampling;   // where a request says nothing
    int64_t max_new_tokens; // likewise; -1: 16 for a completion, what the context leaves for a chat
    mt_chat *chat;          // NULL: no conversations, because of:
    mt_error no_chat;
    pthread_mutex_t *chat_lock;    // a template renders one conversation at a time
    const mt_image_reader *images; // NULL: the model takes no pictures
    int64_t max_image_tokens;      // of a conversation
} mt_service;

/* A request that is refused: the status of HTTP, one sentence, and the field it is about (NULL: none). */
typedef struct mt_request_error {
    int status;
    mt_error error;
    const char *parameter; // a literal
} mt_request_error;

/* A completion or a chat completion. */
typedef struct mt_request {
    const char *model; // the name, of the service
    int64_t adapter;   // of service->adapters, from 1; 0: the base
    bool is_chat, has_tools;
    mt_ids *prompts;                  // [num_prompts]
    int64_t num_prompts, num_choices; // continuations of each prompt
    mt_text_images *images;           // of the one prompt of a conversation; NULL: none
    int64_t max_new_tokens;           // of every choice; fits the context
    mt_sampling sampling;
    bool has_seed;
    int64_t num_rivals; // with the log-probability of each token; -1: no log-probabilities
    bool echo, streams, reports_usage, returns_ids;
    mt_strings stop;
} mt_request;

/* The adapter of a model's name, from 1; 0: the base's; -1: no model has this name. */
int64_t mt_service_find(const mt_service *service, const char *name);

/* Reads the body of /v1/completions or /v1/chat/completions. The result is to be freed, also after a refusal. */
int mt_request_read(mt_request *request, bool is_chat, const char *body, int64_t bytes, const mt_service *service,
                    mt_request_error *refusal);
void mt_request_free(mt_request *request);

/* Reads the body of /tokenize: {"prompt": TEXT}, "add_special_tokens" false: without BOS; or {"messages": [...]} with
 * tools as a chat has them, "add_generation_prompt" false: without the header of an answer. */
int mt_request_read_tokenize(mt_ids *ids, const char *body, int64_t bytes, const mt_service *service,
                             mt_request_error *refusal);

/* Sets a refusal as mt_error_set does; returns -1. */
int mt_refuse(mt_request_error *refusal, int status, const char *parameter, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#ifdef __cplusplus
}
#endif
#endif
