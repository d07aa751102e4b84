/* tokenizer_json.h: reads tokenizer.json, vocab.json and merges.txt, or tiktoken.model into an mt_tokenizer. */
#ifndef MT_TOKENIZER_JSON_H
#define MT_TOKENIZER_JSON_H

#include "../base/file.h"
#include "tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The loaders fill a zeroed tokenizer from memory and refuse unknown parts by name; `path` is for messages. `config`,
 * the tokenizer_config.json beside it, may be NULL. */
int mt_tokenizer_load_json(mt_tokenizer *tokenizer, const char *path, const mt_text *json, const mt_text *config,
                           mt_error *error);
int mt_tokenizer_load_gpt2(mt_tokenizer *tokenizer, const char *vocab_path, const mt_text *vocab,
                           const char *merges_path, const mt_text *merges, mt_error *error);
int mt_tokenizer_load_tiktoken(mt_tokenizer *tokenizer, const char *path, const mt_text *model, const mt_text *config,
                               mt_error *error);

/* Appends the bytes that text[bytes] is in base64; false if it is not. */
bool mt_base64_append(mt_text *out, const char *text, int64_t bytes);

/* An error if a value of tokenizer_config.json that this program reads has another type. */
int mt_tokenizer_config_check(const json_t *config, const char *path, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
