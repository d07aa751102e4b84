/* tokenizer_tiktoken.h: vocabularies of tiktoken as Megatron-LM's TikTokenizer stores them. */
#ifndef MT_TOKENIZER_TIKTOKEN_H
#define MT_TOKENIZER_TIKTOKEN_H

#include "tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The text of a tokenizer.json with the same ids, to free; `path` is for messages. `ranks` is a JSON list of {"rank",
 * "token_bytes" (base64), "token_str"} in the order of the ranks, with all bytes first; ranks beyond the vocabulary are
 * left out. `table` is an empty tokenizer, for work. Special tokens have the first ids: <unk>, <s>, </s>, <mask>,
 * <pad>, <cls>, <sep>, <SPECIAL_7>, ... NULL with error: a list of another form, too few ranks, or a token that is
 * written as a special one. */
char *mt_tiktoken_convert(mt_tokenizer *table, const char *path, const mt_text *ranks,
                          const mt_tiktoken_settings *settings, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
