/* tokenizer_sentencepiece.h: reads a SentencePiece model into an mt_tokenizer. */
#ifndef MT_TOKENIZER_SENTENCEPIECE_H
#define MT_TOKENIZER_SENTENCEPIECE_H

#include "tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fills a zeroed tokenizer from a SentencePiece model in memory; `path` is for messages. */
int mt_tokenizer_load_sentencepiece(mt_tokenizer *tokenizer, const char *path, const mt_text *model, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
