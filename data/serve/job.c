/* job.c: a request at work, and its answers. */
#include "job.h"

#include "../tokens/tokenizer_vocab.h"
#include "tool_calls.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_UNREAD = 1 << 22 }; // bytes of a stream that its client has not read, before it counts as gone

/* ---- a job */

static void *more(void *array, int64_t *capacity, int64_t wanted, int64_t size) {
    if (wanted <= *capacity) return array;
    *capacity = mt_max(wanted, 2 * *capacity);
    return mt_realloc(array, *capacity * size);
}

static const mt_ids *choice_prompt(const mt_choice *choice) {
    return &choice->job->request.prompts[choice->index / choice->job->request.num_choices];
}

/* Appends a token, and its text. */
static const mt_response *add_token(mt_choice *choice, int32_t token, mt_finish finish) {
    mt_job *job = choice->job;
    int64_t at = choice->num_tokens++;
    choice->tokens = more(choice->tokens, &choice->tokens_capacity, at + 1, 4);
    choice->tokens[at] = token;
    if (!job->service->tokenizer) return NULL;
    mt_sequence part = {.id = choice->index, .tokens = choice->tokens, .num_tokens = at + 1, .finish = finish};
    part.num_prompt = choice_prompt(choice)->count;
    const mt_response *response = mt_responses_update(&job->responses, &part);
    choice->ends = more(choice->ends, &choice->ends_capacity, at + 1, 8);
    choice->ends[at] = response->text.bytes;
    return response;
}

mt_job *mt_job_open(mt_exchange *exchange, mt_request *request, const mt_service *service, int64_t number) {
    mt_job *job = mt_calloc(sizeof *job);
    *job = (mt_job){.exchange = exchange, .request = *request, .service = service, .number = number};
    job->created = (int64_t)time(NULL), job->arrived = mt_time();
    job->num_choices = request->num_prompts * request->num_choices;
    job->choices = mt_calloc(job->num_choices * (int64_t)sizeof *job->choices);
    for (int64_t i = 0; i < request->num_prompts; i++) job->prompt_tokens += request->prompts[i].count;
    if (service->tokenizer)
        job->responses = mt_responses_open(service->tokenizer, &job->request.stop, 0, job->num_choices);
    for (int64_t i = 0; i < job->num_choices; i++) {
        mt_choice *choice = &job->choices[i];
        choice->job = job, choice->index = i;
        const mt_ids *prompt = choice_prompt(choice);
        for (int64_t t = 0; t < prompt->count; t++) add_token(choice, prompt->data[t], MT_UNFINISHED);
        choice->seen = prompt->count;
    }
    return job;
}

void mt_job_close(mt_job *job) {
    if (!job) return;
    for (int64_t i = 0; i < job->num_choices; i++) {
        mt_scores_end(&job->choices[i].scores);
        free(job->choices[i].ends), free(job->choices[i].tokens);
    }
    if (job->responses.items) mt_responses_close(&job->responses);
    free(job->choices);
    mt_request_free(&job->request);
    mt_exchange_release(job->exchange);
    free(job);
}

void mt_job_begin(mt_job *job, mt_engine *engine) {
    const mt_request *r = &job->request;
    job->began = mt_time();
    job->num_live = job->num_choices;
    for (int64_t i = 0; i < job->num_choices; i++) {
        mt_choice *choice = &job->choices[i];
        const mt_ids *prompt = choice_prompt(choice);
        mt_engine_request wanted = {.id = i, .prompt = prompt->data, .num_prompt = prompt->count, .owner = choice};
        wanted.max_new_tokens = r->max_new_tokens, wanted.sampling = r->sampling, wanted.adapter = r->adapter;
        wanted.images = r->images;
        choice->is_live = true;
        if (r->num_rivals >= 0) {
            int64_t first = r->echo ? 1 : prompt->count, end = prompt->count + r->max_new_tokens;
            mt_scores_begin(&choice->scores, first, end, r->num_rivals, job->service->vocab_size);
            wanted.view = mt_scores_view, wanted.view_context = &choice->scores, wanted.views_prompt = r->echo;
        }
        mt_engine_add(engine, &wanted);
    }
}

/* ---- tokens */

bool mt_job_advance(mt_choice *choice, int32_t token, mt_finish finish) {
    mt_job *job = choice->job;
    if (choice->finish) return true;
    choice->has_begun = true;
    if (token >= 0) {
        const mt_response *response = add_token(choice, token, finish);
        choice->is_cut = response && response->ended && finish == MT_UNFINISHED;
        job->new_tokens++;
    }
    if (job->first == 0) job->first = mt_time();
    if (!choice->is_cut && finish == MT_UNFINISHED) return false;
    choice->finish = choice->is_cut || finish == MT_FINISH_STOP ? "stop" : "length";
    job->num_finished++;
    return true;
}

/* The bytes of a token's text: those of special tokens too. */
static void token_text(mt_text *text, const mt_service *service, int32_t token) {
    mt_error error;
    text->bytes = 0;
    if (!service->tokenizer || token >= mt_tokenizer_vocab_size(service->tokenizer)) return;
    if (mt_tokenizer_is_special(service->tokenizer, token)) {
        mt_text_append(text, mt_token_text(service->tokenizer, token), service->tokenizer->tokens[token].text_bytes);
    } else if (mt_tokenizer_decode(service->tokenizer, &token, 1, text, &error) != 0) {
        text->bytes = 0;
    }
}

/* A text as JSON; bytes that are not UTF-8 become U+FFFD. */
static json_t *json_text(const char *text, int64_t bytes) {
    json_t *string = json_stringn(text ? text : "", (size_t)bytes);
    if (string) return string;
    mt_text whole = {0};
    mt_utf8_repair(&whole, text, bytes);
    string = json_stringn(whole.data, (size_t)whole.bytes);
    free(whole.data);
    return string;
}

/* A token's text as the name of a rival: "bytes:\xe2\x80" where it is a part of a character; "token:17" where there is
 * no tokenizer. */
static char *token_name(const mt_service *service, mt_text *text, int32_t token) {
    token_text(text, service, token);
    mt_text name = {0};
    char part[32];
    if (!service->tokenizer) {
        mt_text_append(&name, part, snprintf(part, sizeof part, "token:%d", token));
    } else if (text->bytes == 0 || mt_utf8_is_valid(text->data, text->bytes)) {
        mt_text_append(&name, text->data, text->bytes);
    } else {
        mt_text_append(&name, "bytes:", 6);
        for (int64_t i = 0; i < text->bytes; i++)
            mt_text_append(&name, part, snprintf(part, sizeof part, "\\x%02x", (unsigned char)text->data[i]));
    }
    mt_text_append(&name, "", 1);
    return name.data;
}

/* ---- log-probabilities */

/* A log-probability; that of the impossible is a number too, as JSON has no infinity. */
static json_t *json_logp(float logp) {
    return mt_json_real(isfinite(logp) ? (double)logp : -9999.0);
}

static int64_t count_characters(const char *text, int64_t bytes) {
    int64_t count = 0;
    for (int64_t i = 0; i < bytes; i++) count += (text[i] & 0xC0) != 0x80;
    return count;
}

/* {"tokens", "token_logprobs", "top_logprobs", "text_offset"} of tokens [from, to) of a choice. */
static json_t *completion_logprobs(const mt_choice *choice, int64_t from, int64_t to) {
    const mt_job *job = choice->job;
    const mt_scores *s = &choice->scores;
    json_t *tokens = json_array(), *logps = json_array(), *tops = json_array(), *offsets = json_array();
    const char *text = job->responses.items ? job->responses.items[choice->index].text.data : NULL;
    int64_t first_byte = job->request.echo || !text ? 0 : job->responses.items[choice->index].prompt_bytes;
    int64_t counted = first_byte, characters = 0;
    mt_text scratch = {0};
    for (int64_t t = from; t < to; t++) {
        int64_t at = t - s->first, start = text && t > 0 ? mt_max(choice->ends[t - 1], first_byte) : 0;
        char *name = token_name(job->service, &scratch, choice->tokens[t]);
        json_array_append_new(tokens, json_text(name, (int64_t)strlen(name)));
        if (text && start > counted) characters += count_characters(text + counted, start - counted), counted = start;
        json_array_append_new(offsets, json_integer(characters));
        json_array_append_new(logps, at < 0 ? json_null() : json_logp(s->logps[at]));
        json_t *top = at < 0 || s->num_rivals == 0 ? json_null() : json_object();
        if (json_is_object(top)) json_object_set_new(top, name, json_logp(s->logps[at]));
        for (int64_t i = 0; i < s->num_rivals && at >= 0; i++) {
            char *rival = token_name(job->service, &scratch, s->rivals[at * s->num_rivals + i]);
            if (!json_object_get(top, rival)) // of two tokens with one text, the more probable
                json_object_set_new(top, rival, json_logp(s->rival_logps[at * s->num_rivals + i]));
            free(rival);
        }
        json_array_append_new(tops, top);
        free(name);
    }
    free(scratch.data);
    json_t *all = json_object();
    json_object_set_new(all, "tokens", tokens), json_object_set_new(all, "token_logprobs", logps);
    json_object_set_new(all, "top_logprobs", tops), json_object_set_new(all, "text_offset", offsets);
    return all;
}

/* {"token", "logprob", "bytes"}. */
static json_t *chat_logprob(const mt_job *job, mt_text *scratch, int32_t token, float logp) {
    json_t *entry = json_object(), *bytes = json_array();
    char *name = token_name(job->service, scratch, token);
    json_object_set_new(entry, "token", json_text(name, (int64_t)strlen(name)));
    json_object_set_new(entry, "logprob", json_logp(logp));
    for (int64_t i = 0; i < scratch->bytes; i++)
        json_array_append_new(bytes, json_integer((unsigned char)scratch->data[i]));
    json_object_set_new(entry, "bytes", bytes);
    free(name);
    return entry;
}

/* {"content": [...]} of tokens [from, to) of a choice. */
static json_t *chat_logprobs(const mt_choice *choice, int64_t from, int64_t to) {
    const mt_scores *s = &choice->scores;
    json_t *content = json_array(), *all = json_object();
    mt_text scratch = {0};
    for (int64_t t = from; t < to; t++) {
        int64_t at = t - s->first;
        json_t *entry = chat_logprob(choice->job, &scratch, choice->tokens[t], s->logps[at]), *tops = json_array();
        for (int64_t i = 0; i < s->num_rivals; i++)
            json_array_append_new(tops, chat_logprob(choice->job, &scratch, s->rivals[at * s->num_rivals + i],
                                                     s->rival_logps[at * s->num_rivals + i]));
        json_object_set_new(entry, "top_logprobs", tops);
        json_array_append_new(content, entry);
    }
    free(scratch.data);
    json_object_set_new(all, "content", content);
    json_object_set_new(all, "refusal", json_null());
    return all;
}

/* ---- answers */

static json_t *usage(const mt_job *job) {
    json_t *numbers = json_object();
    mt_json_set_int(numbers, "prompt_tokens", job->prompt_tokens);
    mt_json_set_int(numbers, "completion_tokens", job->new_tokens);
    mt_json_set_int(numbers, "total_tokens", job->prompt_tokens + job->new_tokens);
    return numbers;
}

/* An answer, or a part of a stream, without its choices. */
static json_t *begin_answer(const mt_job *job) {
    json_t *root = json_object();
    char id[64];
    bool chat = job->request.is_chat;
    snprintf(id, sizeof id, "%s-%lld-%lld", chat ? "chatcmpl" : "cmpl", (long long)job->created,
             (long long)job->number);
    mt_json_set_string(root, "id", id);
    mt_json_set_string(root, "object",
                       !chat                  ? "text_completion"
                       : job->request.streams ? "chat.completion.chunk"
                                              : "chat.completion");
    mt_json_set_int(root, "created", job->created);
    mt_json_set_string(root, "model", job->request.model);
    return root;
}

/* The first token of a choice's answer, and the one behind the last that is reported: none behind a stop string. */
static int64_t first_token(const mt_choice *choice) {
    return choice->job->request.echo ? 0 : choice_prompt(choice)->count;
}

static int64_t last_token(const mt_choice *choice, int64_t bytes) {
    int64_t end = choice->num_tokens, first = first_token(choice);
    if (choice->is_cut || !choice->finish)
        while (end > first && choice->ends && (end > 1 ? choice->ends[end - 2] : 0) >= bytes) end--;
    return end;
}

/* The first byte of a choice's answer in its text. */
static int64_t first_byte(const mt_choice *choice) {
    const mt_response *response = &choice->job->responses.items[choice->index];
    return choice->job->request.echo ? 0 : response->prompt_bytes;
}

static void set_ids(json_t *object, const mt_choice *choice, int64_t from, int64_t to) {
    if (!choice->job->request.returns_ids) return;
    json_t *ids = json_array();
    for (int64_t t = from; t < to; t++) json_array_append_new(ids, json_integer(choice->tokens[t]));
    json_object_set_new(object, "token_ids", ids);
}

/* A choice with this text and these tokens, in the shape of the request: `delta` NULL: of a whole answer. */
static json_t *make_choice(const mt_choice *choice, mt_text *text, int64_t from, int64_t to, json_t *delta) {
    const mt_job *job = choice->job;
    const mt_request *r = &job->request;
    json_t *object = json_object(), *logprobs = json_null();
    const char *finish = choice->finish;
    mt_json_set_int(object, "index", choice->index);
    if (r->num_rivals >= 0 && to > from)
        logprobs = r->is_chat ? chat_logprobs(choice, from, to) : completion_logprobs(choice, from, to);
    if (!r->is_chat) {
        json_object_set_new(object, "text", json_text(text->data, text->bytes));
    } else if (delta) {
        json_object_set(object, "delta", delta);
    } else {
        json_t *message = json_object(),
               *calls = r->has_tools ? mt_tool_calls_take(text, job->number, choice->index) : NULL;
        mt_json_set_string(message, "role", "assistant");
        json_object_set_new(message, "content",
                            calls && text->bytes == 0 ? json_null() : json_text(text->data, text->bytes));
        if (calls) json_object_set_new(message, "tool_calls", calls), finish = "tool_calls";
        json_object_set_new(object, "message", message);
    }
    json_object_set_new(object, "logprobs", logprobs);
    json_object_set_new(object, "finish_reason", finish ? json_string(finish) : json_null());
    set_ids(object, choice, from, to);
    return object;
}

/* A copy of bytes [from, to) of a choice's text. */
static mt_text copy_text(const mt_choice *choice, int64_t from, int64_t to) {
    mt_text text = {0};
    if (to > from) mt_text_append(&text, choice->job->responses.items[choice->index].text.data + from, to - from);
    return text;
}

static void send_whole(mt_job *job) {
    json_t *root = begin_answer(job), *choices = json_array();
    for (int64_t i = 0; i < job->num_choices; i++) {
        const mt_choice *choice = &job->choices[i];
        int64_t bytes = job->responses.items ? job->responses.items[i].text.bytes : 0;
        mt_text text = {0};
        if (job->responses.items) text = copy_text(choice, first_byte(choice), bytes);
        int64_t to = mt_max(last_token(choice, bytes), first_token(choice));
        json_array_append_new(choices, make_choice(choice, &text, first_token(choice), to, NULL));
        free(text.data);
    }
    json_object_set_new(root, "choices", choices);
    json_object_set_new(root, "usage", usage(job));
    char *text = json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(9));
    mt_exchange_answer(job->exchange, 200, "application/json", text, (int64_t)strlen(text));
    free(text);
    json_decref(root);
}

/* Sends an event of a stream, and frees it. */
static void send_event(mt_job *job, json_t *root) {
    char *text = json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(9));
    mt_text event = {0};
    if (!job->has_head) mt_exchange_begin(job->exchange, "text/event-stream");
    job->has_head = true;
    mt_text_append(&event, "data: ", 6);
    mt_text_append(&event, text, (int64_t)strlen(text));
    mt_text_append(&event, "\n\n", 2);
    if (mt_exchange_send(job->exchange, event.data, event.bytes) > MOST_UNREAD) job->is_over = true;
    free(event.data);
    free(text);
    json_decref(root);
}

static void send_choice(mt_job *job, json_t *choice) {
    json_t *root = begin_answer(job), *choices = json_array();
    json_array_append_new(choices, choice);
    json_object_set_new(root, "choices", choices);
    if (job->request.reports_usage) json_object_set_new(root, "usage", json_null());
    send_event(job, root);
}

/* The calls of a finished choice, as the last delta before its end. */
static void send_calls(mt_job *job, mt_choice *choice, int64_t bytes) {
    mt_text rest = copy_text(choice, choice->sent_bytes, bytes);
    json_t *calls = rest.bytes > 0 ? mt_tool_calls_take(&rest, job->number, choice->index) : NULL, *call;
    if (calls) {
        size_t i;
        json_array_foreach(calls, i, call) mt_json_set_int(call, "index", (int64_t)i);
        json_t *delta = json_object();
        if (rest.bytes > 0) json_object_set_new(delta, "content", json_text(rest.data, rest.bytes));
        json_object_set_new(delta, "tool_calls", calls);
        choice->finish = NULL;
        send_choice(job, make_choice(choice, &rest, 0, 0, delta));
        choice->finish = "tool_calls", choice->sent_bytes = bytes;
        json_decref(delta);
    }
    free(rest.data);
}

/* Sends what is new of a choice, as far as no stop string can cut it off any more. */
static void stream_choice(mt_job *job, mt_choice *choice) {
    const mt_request *r = &job->request;
    int64_t settled = 0, first = job->responses.items ? first_byte(choice) : 0;
    if (!choice->has_begun || choice->sent_tokens < 0) return; // it waits, or its end is sent
    choice->sent_bytes = mt_max(choice->sent_bytes, first);
    choice->sent_tokens = mt_max(choice->sent_tokens, first_token(choice));
    if (job->responses.items) {
        const mt_response *response = &job->responses.items[choice->index];
        settled = mt_responses_settled(&job->responses, response);
        if (choice->finish && r->has_tools) send_calls(job, choice, response->text.bytes);
        if (!choice->finish && r->has_tools)
            settled = mt_tool_calls_begin(response->text.data, choice->sent_bytes, settled);
    }
    int64_t to = last_token(choice, settled);
    bool has_news = settled > choice->sent_bytes || (!job->responses.items && to > choice->sent_tokens);
    if (!has_news && !choice->finish) return;
    mt_text text = {0};
    if (job->responses.items) text = copy_text(choice, choice->sent_bytes, settled);
    json_t *delta = r->is_chat ? json_object() : NULL;
    if (r->is_chat && text.bytes > 0) json_object_set_new(delta, "content", json_text(text.data, text.bytes));
    send_choice(job, make_choice(choice, &text, choice->sent_tokens, mt_max(to, choice->sent_tokens), delta));
    json_decref(delta);
    free(text.data);
    choice->sent_bytes = mt_max(settled, choice->sent_bytes), choice->sent_tokens = mt_max(to, choice->sent_tokens);
    if (choice->finish) choice->sent_tokens = -1;
}

/* The first event of a choice of a chat names its role. */
static void send_roles(mt_job *job) {
    for (int64_t i = 0; i < job->num_choices; i++) {
        json_t *delta = json_object(), *object = json_object();
        mt_json_set_string(delta, "role", "assistant"), mt_json_set_string(delta, "content", "");
        mt_json_set_int(object, "index", i);
        json_object_set_new(object, "delta", delta);
        json_object_set_new(object, "logprobs", json_null());
        json_object_set_new(object, "finish_reason", json_null());
        send_choice(job, object);
    }
}

static void send_end(mt_job *job) {
    if (job->request.reports_usage) {
        json_t *root = begin_answer(job);
        json_object_set_new(root, "choices", json_array());
        json_object_set_new(root, "usage", usage(job));
        send_event(job, root);
    }
    static const char done[] = "data: [DONE]\n\n";
    mt_exchange_send(job->exchange, done, sizeof done - 1);
    mt_exchange_end(job->exchange);
}

void mt_job_answer(mt_job *job) {
    bool ends = job->num_finished == job->num_choices;
    if (job->is_over) return;
    if (job->request.streams) {
        if (!job->has_head && job->request.is_chat) send_roles(job);
        for (int64_t i = 0; i < job->num_choices; i++) stream_choice(job, &job->choices[i]);
        if (ends) send_end(job);
    } else if (ends) {
        send_whole(job);
    }
    job->is_over |= ends;
}

void mt_job_fail(mt_job *job, int status, const char *message) {
    if (job->is_over) return;
    job->is_over = true;
    if (!job->has_head) {
        mt_exchange_refuse(job->exchange, status, message, NULL);
        return;
    }
    char *text = mt_http_error(status, message, NULL);
    mt_text event = {0};
    mt_text_append(&event, "data: ", 6);
    mt_text_append(&event, text, (int64_t)strlen(text));
    mt_text_append(&event, "\n\n", 2);
    mt_exchange_send(job->exchange, event.data, event.bytes);
    mt_exchange_end(job->exchange);
    free(event.data);
    free(text);
}
