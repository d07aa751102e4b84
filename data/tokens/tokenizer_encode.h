/* tokenizer_encode.h: text to ids: normalizers, pre-tokenizers, BPE, unigram, added tokens. */
#ifndef MT_TOKENIZER_ENCODE_H
#define MT_TOKENIZER_ENCODE_H

#include "tokenizer.h"
#include "tokenizer_vocab.h"

#ifdef __cplusplus
extern "C" {
#endif

extern const char mt_gpt2_pattern[];

/* A regular expression (refused without PCRE2), or a literal string. */
int mt_pattern_compile(mt_pattern *out, const char *path, const char *regex, int64_t bytes, mt_error *error);
void mt_pattern_literal(mt_pattern *out, const char *text, int64_t bytes);
void mt_pattern_free(mt_pattern *pattern);
void mt_rule_free(mt_rule *rule);

/* Applies all normalizers. *text and *bytes become the result, which is valid until the encoder's next call. */
int mt_normalize(mt_encoder *encoder, const char **text, int64_t *bytes, mt_error *error);

/* mt_encode for valid UTF-8 of at most MT_MAX_TEXT bytes that also recognises SentencePiece's control tokens. Appends
 * to `places` for each special or other added token: its index in `ids`, and its first byte and the byte behind its
 * last in the text. Tokens that a file matches only after normalization have no place. */
int mt_encode_places(mt_encoder *encoder, const char *text, int64_t bytes, mt_ids *ids, mt_ids *places,
                     mt_error *error);

/* Sets words_at_spaces where true; call it when the vocabulary is complete. */
void mt_tokenizer_find_words(mt_tokenizer *tokenizer);

/* An encoder for one thread; the tokenizer must outlive it. */
mt_encoder *mt_encoder_open(const mt_tokenizer *tokenizer);
void mt_encoder_close(mt_encoder *encoder);

/* Appends the ids of `text` to `ids`; adds no BOS and no EOD. Added tokens (such as <|endoftext|>) are recognised in
 * the text, as by `tokenizers`; SentencePiece's control tokens are not, as by `sentencepiece`. Errors: text over 1 GiB;
 * a pattern that exceeds PCRE2's match limit. On error `ids` is unchanged. */
int mt_encode(mt_encoder *encoder, const char *text, int64_t bytes, mt_ids *ids, mt_error *error);

/* mt_encode for a part of a text. Special tokens are not recognised in it (Hugging Face: split_special_tokens), other
 * added tokens are. `first`: the part begins the text; other parts get no space before them (SentencePiece's dummy
 * prefix, Metaspace's prefix). */
int mt_encode_part(mt_encoder *encoder, const char *text, int64_t bytes, bool first, mt_ids *ids, mt_error *error);

/* mt_encode with a temporary encoder, for a few texts. */
int mt_tokenizer_encode(const mt_tokenizer *tokenizer, const char *text, int64_t bytes, mt_ids *ids, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
