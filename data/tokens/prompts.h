/* prompts.h: prompts as tokens or text, and the token that begins them. */
#ifndef MT_PROMPTS_H
#define MT_PROMPTS_H

#include "tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sets *begins to true if Hugging Face's tokenizer at `path`, a folder or a file, puts its BOS token before a text. The
 * first of these that exists decides: add_bos_token of the folder's tokenizer_config.json; tokenizer.json's
 * post-processor; true for SentencePiece's .model. A damaged file is an error. */
int mt_prompt_begins_with_bos(const char *path, bool *begins, mt_error *error);

/* The tokens that Hugging Face's tokenizer at `path` puts before and behind a text, as a call of it and Megatron's
 * HuggingFaceTokenizer do: those of tokenizer.json's post-processor, unless add_bos_token decides otherwise on BOS.
 * Free both arrays. */
typedef struct mt_text_frame {
    mt_ids before, after;
} mt_text_frame;
int mt_text_frame_read(mt_text_frame *frame, const char *path, const mt_tokenizer *tokenizer, mt_error *error);

/* Begins a sequence from prompt[num_prompt], with up to max_new_tokens more tokens and `context` tokens in
 * all. Errors: an empty prompt, a prompt that fills the context, a token outside the vocabulary. */
int mt_sequence_begin(mt_sequence *sequence, int64_t id, const int32_t *prompt, int64_t num_prompt, int64_t context,
                      int64_t max_new_tokens, const mt_options *options, mt_error *error);

/* Frees its arrays. */
void mt_sequence_end(mt_sequence *sequence);

/* The same for an encoder-decoder: a sequence that begins with token 0, and has a copy of inputs[num_inputs]. */
int mt_sequence_begin_mapping(mt_sequence *sequence, int64_t id, const int32_t *inputs, int64_t num_inputs,
                              int64_t context, int64_t max_new_tokens, const mt_options *options, mt_error *error);

/* mt_sequence_begin from token ids as text, such as "1,2,3"; any other text is an error. */
int mt_sequence_parse(mt_sequence *sequence, int64_t id, const char *text, int64_t context, int64_t max_new_tokens,
                      const mt_options *options, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
