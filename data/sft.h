/* sft.h: samples for fine-tuning, sequences of any length in memory.
 *
 *   chat.c      conversations -> tokens, by chat templates
 *   sft.c       JSON Lines of conversations, prompts with responses, or texts -> tokens to train on
 *   packing.c   samples -> rows of at most --seq-length tokens; rows -> micro-batches with even work
 */
#ifndef MT_SFT_H
#define MT_SFT_H

#include "dataset.h"
#include "tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sequences one after another. Sample s has the tokens [offsets[s], offsets[s + 1]): inputs are all but its last token,
 * labels all but its first, so it takes offsets[s + 1] - offsets[s] - 1 >= 1 positions of a micro-batch. */
typedef struct mt_samples {
    int64_t count;
    int64_t *offsets;    // [count + 1]
    int32_t *tokens;     // [offsets[count]]
    uint8_t *is_trained; // [offsets[count]]: the loss counts the prediction of this token
} mt_samples;

/* Frees the arrays. */
void mt_samples_free(mt_samples *samples);

/* The files of samples and how they are read. */
typedef struct mt_sft_config {
    mt_strings paths;           // JSON Lines, read in this order
    const char *tokenizer_path; // file or folder of the tokenizer; NULL: none
    int64_t vocab_size;         // tokens must be below it
    int64_t seq_length;         // positions of the longest sample
    mt_chat_template chat_template;
    mt_loss_on loss_on;
    mt_long_samples long_samples;
    int64_t skip_bad_samples; // bad lines that are left out; one more is an error
    // Keys of the fields; NULL: messages; prompt or instruction; input; response or output
    const char *messages_key, *prompt_key, *query_key, *response_key;
    bool pairs; // lines hold a chosen and a rejected response: samples 2i and 2i + 1. Else such lines are bad
    FILE *log;  // skipped lines and a summary are printed here; NULL: nowhere
} mt_sft_config;

/* Reads all samples of the files into memory; free them, but not after an error. A line of JSON is one of
 *
 *   {"messages": [{"role": "user", "content": "..."}, ...]}
 *   {"prompt": "...", "response": "..."}, also with keys instruction, input and output, as in Alpaca
 *   {"text": "..."}, which is trained on as a whole
 *   {"prompt": "...", "chosen": "...", "rejected": "..."} with `pairs`; the three may be lists of messages, and the
 *   prompt may be missing
 *
 * Blank lines are skipped. Errors: a file that cannot be read; more bad lines than skip_bad_samples, with the file and
 * the line of the first; a token outside the vocabulary; no sample at all. */
int mt_samples_read(mt_samples *samples, const mt_sft_config *config, const mt_tokenizer *tokenizer, mt_error *error);

/* A number that equal samples share, for mt_fingerprints_agree. */
uint64_t mt_samples_fingerprint(const mt_samples *samples);

#ifdef __cplusplus
}
#endif
#endif
