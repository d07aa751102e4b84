/* response.h: the texts of sequences as their tokens come, stop strings, and results as JSON Lines. */
#ifndef MT_RESPONSE_H
#define MT_RESPONSE_H

#include "tokenizer.h"

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The text of a sequence. */
typedef struct mt_response {
    mt_decoder *decoder;
    mt_text text;         // of the prompt and the generated tokens, without special tokens
    int64_t num_tokens;   // whose text that is
    int64_t prompt_bytes; // of `text`
    int64_t searched;     // bytes of `text` in which no stop string begins
    bool ended;           // it ends before a stop string, or with the sequence
} mt_response;

/* The texts of several sequences, by the index of each: its id less first_id. */
typedef struct mt_responses {
    const mt_tokenizer *tokenizer;
    const mt_strings *stops; // texts that end a sequence, and are cut off; may span tokens
    int64_t first_id, count;
    mt_response *items; // [count]
} mt_responses;

/* The first place from `from` on in a text at which one of the stop strings begins; -1: there is none. */
int64_t mt_stop_find(const char *text, int64_t from, int64_t bytes, const mt_strings *stops);

/* Texts of `count` sequences, to close. The tokenizer and the stop strings must outlive them. */
mt_responses mt_responses_open(const mt_tokenizer *tokenizer, const mt_strings *stops, int64_t first_id, int64_t count);
void mt_responses_close(mt_responses *responses);

/* Adds the text of the sequence's new tokens; at its end also that of an incomplete character, U+FFFD. A token that the
 * tokenizer does not have is U+FFFD. */
const mt_response *mt_responses_update(mt_responses *responses, const mt_sequence *sequence);

/* mt_stops.ends_text, with mt_responses as context: true once a stop string is in the generated text. */
bool mt_responses_end(void *responses, const mt_sequence *sequence);

/* Bytes of the text that no stop string can cut off any more. */
int64_t mt_responses_settled(const mt_responses *responses, const mt_response *response);

/* Writes a line {"prompt": index, "sample": index, "tokens": [...], "text": "...", "logprobs": [...],
 * "sampled_logprobs": [...], "finish_reason": "stop" or "length"}: of the generated tokens, where the sequence's id is
 * prompt * num_return_sequences + sample. `response` NULL: without a text. See mt_sampled for the log-probabilities. */
void mt_response_write(FILE *file, const mt_sequence *sequence, const mt_response *response,
                       int64_t num_return_sequences);

#ifdef __cplusplus
}
#endif
#endif
