/* response.c: the texts of sequences as their tokens come, stop strings, and results as JSON Lines. */
#include "response.h"

#include "../base/file.h"
#include "tokenizer_vocab.h"

#include <stdlib.h>
#include <string.h>

mt_responses mt_responses_open(const mt_tokenizer *tokenizer, const mt_strings *stops, int64_t first_id,
                               int64_t count) {
    mt_responses r = {.tokenizer = tokenizer, .stops = stops, .first_id = first_id, .count = count};
    r.items = mt_calloc((count + 1) * (int64_t)sizeof *r.items);
    for (int64_t i = 0; i < count; i++) {
        r.items[i].decoder = mt_decoder_open(tokenizer);
        mt_text_append(&r.items[i].text, "", 0);
    }
    return r;
}

void mt_responses_close(mt_responses *r) {
    for (int64_t i = 0; i < r->count; i++) {
        mt_decoder_close(r->items[i].decoder);
        free(r->items[i].text.data);
    }
    free(r->items);
    *r = (mt_responses){.count = 0};
}

int64_t mt_stop_find(const char *text, int64_t from, int64_t bytes, const mt_strings *stops) {
    for (int64_t at = from; at < bytes; at++)
        for (int64_t i = 0; i < stops->count; i++) {
            int64_t length = (int64_t)strlen(stops->items[i]);
            if (length <= bytes - at && memcmp(text + at, stops->items[i], (size_t)length) == 0) return at;
        }
    return -1;
}

/* Cuts the text before the first stop string. */
static void find_stop(const mt_responses *r, mt_response *response) {
    mt_text *text = &response->text;
    int64_t longest = 1, at = mt_stop_find(text->data, response->searched, text->bytes, r->stops);
    for (int64_t i = 0; i < r->stops->count; i++) longest = mt_max(longest, (int64_t)strlen(r->stops->items[i]));
    response->searched = mt_max(response->searched, text->bytes - longest + 1);
    if (at >= 0) text->bytes = at, response->ended = true;
}

const mt_response *mt_responses_update(mt_responses *r, const mt_sequence *sequence) {
    mt_response *response = &r->items[sequence->id - r->first_id];
    mt_text *text = &response->text;
    mt_error error;
    for (; response->num_tokens < sequence->num_tokens && !response->ended; response->num_tokens++) {
        int32_t token = sequence->tokens[response->num_tokens];
        if (response->num_tokens == sequence->num_prompt) response->prompt_bytes = response->searched = text->bytes;
        if (mt_tokenizer_is_special(r->tokenizer, token)) continue;
        if (mt_decode_next(response->decoder, token, text, &error) != 0) mt_text_append(text, "\xEF\xBF\xBD", 3);
        if (response->num_tokens >= sequence->num_prompt) find_stop(r, response);
    }
    if (sequence->num_tokens == sequence->num_prompt) response->prompt_bytes = text->bytes;
    if (sequence->finish != MT_UNFINISHED && !response->ended) {
        mt_decode_end(response->decoder, text);
        response->ended = true;
    }
    return response;
}

bool mt_responses_end(void *responses, const mt_sequence *sequence) {
    return mt_responses_update(responses, sequence)->ended;
}

int64_t mt_responses_settled(const mt_responses *r, const mt_response *response) {
    const mt_text *text = &response->text;
    int64_t settled = text->bytes;
    for (int64_t i = 0; i < r->stops->count && !response->ended; i++) {
        const char *stop = r->stops->items[i];
        int64_t bytes = mt_min((int64_t)strlen(stop) - 1, text->bytes - response->prompt_bytes);
        while (bytes > 0 && memcmp(text->data + text->bytes - bytes, stop, (size_t)bytes) != 0) bytes--;
        settled = mt_min(settled, text->bytes - bytes);
    }
    return settled;
}

static json_t *numbers_of(const float *values, int64_t count) {
    json_t *list = json_array();
    for (int64_t i = 0; i < count; i++) json_array_append_new(list, mt_json_real((double)values[i]));
    return list;
}

void mt_response_write(FILE *file, const mt_sequence *sequence, const mt_response *response,
                       int64_t num_return_sequences) {
    static const char *const reasons[] = {"", "stop", "length"};
    json_t *line = json_object(), *tokens = json_array();
    int64_t first = sequence->num_prompt, count = sequence->num_tokens - first;
    mt_json_set_int(line, "prompt", sequence->id / num_return_sequences);
    mt_json_set_int(line, "sample", sequence->id % num_return_sequences);
    for (int64_t i = 0; i < count; i++) json_array_append_new(tokens, json_integer(sequence->tokens[first + i]));
    json_object_set_new(line, "tokens", tokens);
    if (response) {
        const char *text = response->text.data + response->prompt_bytes;
        json_t *string = json_stringn(text, (size_t)(response->text.bytes - response->prompt_bytes));
        json_object_set_new(line, "text",
                            string ? string : json_null()); // not UTF-8: part of a character of the prompt
    }
    json_object_set_new(line, "logprobs", numbers_of(sequence->logps, count));
    json_object_set_new(line, "sampled_logprobs", numbers_of(sequence->sampled_logps, count));
    mt_json_set_string(line, "finish_reason", reasons[sequence->finish]);
    json_dumpf(line, file, JSON_COMPACT | JSON_REAL_PRECISION(9));
    putc('\n', file);
    json_decref(line);
}
