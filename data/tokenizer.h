/* tokenizer.h: text to token ids and back.
 *
 *   mt_tokenizer  the vocabulary and its rules. Never changes once open: any number of threads may share it.
 *   mt_encoder    one thread's working memory for encoding (word cache, regular-expression state).
 *   mt_decoder    turns ids that arrive one at a time into whole UTF-8 characters, as generation needs.
 *
 * Formats: Hugging Face tokenizer.json with a BPE model (byte-level as GPT-2, Qwen and Llama 3; metaspace with byte
 * fallback as Llama 2), GPT-2's vocab.json + merges.txt, SentencePiece .model (BPE and unigram), and raw bytes. Ids
 * equal those of the `tokenizers` and `sentencepiece` libraries. What a file asks for and is not supported is refused
 * by name.
 *
 * Text is bytes with a length: NUL is an ordinary character. Invalid UTF-8 is encoded as U+FFFD, as the reference
 * libraries do: once per ill-formed sequence for tokenizer.json and GPT-2 (as Python's errors="replace"), once per byte
 * for SentencePiece. ByteLevel passes every byte through.
 */
#ifndef MT_TOKENIZER_H
#define MT_TOKENIZER_H

#include "../megatron.h"

typedef struct mt_tokenizer mt_tokenizer;
typedef struct mt_encoder mt_encoder;
typedef struct mt_decoder mt_decoder;

/* Growable arrays that the functions below append to. Start them as {0}; free(data) when done. */
typedef struct mt_ids {
    int32_t *data;
    int64_t count, capacity;
} mt_ids;

typedef struct mt_text {
    char *data;
    int64_t bytes, capacity;
} mt_text;

/* Opens a tokenizer. `type` and `path`:
 *   HuggingFaceTokenizer    tokenizer.json, or a folder that holds one
 *   SentencePieceTokenizer  a .model file, or a folder that holds tokenizer.model
 *   GPT2BPETokenizer        a folder with vocab.json and merges.txt; "VOCAB.json,MERGES.txt"; or VOCAB.json with the
 * merges beside it (X-vocab.json finds X-merges.txt) ByteLevel               no path: ids 0..255 are bytes, 256 ends a
 * document A missing, damaged or unsupported file is an error. */
int mt_tokenizer_open(mt_tokenizer **out, const char *type, const char *path, mt_error *error);

/* Opens whatever tokenizer a model folder holds: a ByteLevel marker as mt_tokenizer_save writes it, tokenizer.json,
 * tokenizer.model, or vocab.json with merges.txt, looked for in this order. None of them is an error. */
int mt_tokenizer_open_folder(mt_tokenizer **out, const char *folder, mt_error *error);

/* Writes the files that the tokenizer was opened from (kept in memory since) into an existing folder, each renamed into
 * place when it is complete, so that mt_tokenizer_open_folder and other libraries find it there. */
int mt_tokenizer_save(const mt_tokenizer *tokenizer, const char *folder, mt_error *error);

/* Frees it; its encoders and decoders must be closed before. NULL is fine, here and below. */
void mt_tokenizer_close(mt_tokenizer *tokenizer);

/* Ids run from 0 to vocab_size - 1; a vocabulary may leave some of them unused. */
int64_t mt_tokenizer_vocab_size(const mt_tokenizer *tokenizer);

/* The token that ends a document, and the one that begins a text; -1 where the tokenizer has none. From the
 * tokenizer_config.json beside a tokenizer.json, else by the usual names (</s>, <|endoftext|>, ...). */
int32_t mt_tokenizer_eod(const mt_tokenizer *tokenizer);
int32_t mt_tokenizer_bos(const mt_tokenizer *tokenizer);

/* True for ids that stand for no text of their own, such as <s> or <|im_end|>; a program that shows text skips them. */
bool mt_tokenizer_is_special(const mt_tokenizer *tokenizer, int32_t id);

/* One thread's encoder; the tokenizer must outlive it. */
mt_encoder *mt_encoder_open(const mt_tokenizer *tokenizer);
void mt_encoder_close(mt_encoder *encoder);

/* Appends the ids of `text` to `ids`. Adds no BOS and no EOD. Added tokens (such as <|endoftext|>) are recognised in
 * the text as `tokenizers` does; SentencePiece's control tokens are not, as `sentencepiece` does. Errors: text over 1
 * GiB, a pattern of the tokenizer that PCRE2 gives up on; `ids` then holds what it held before. */
int mt_encode(mt_encoder *encoder, const char *text, int64_t bytes, mt_ids *ids, mt_error *error);

/* mt_encode with an encoder of its own, for a text or two. */
int mt_tokenizer_encode(const mt_tokenizer *tokenizer, const char *text, int64_t bytes, mt_ids *ids, mt_error *error);

/* Appends the bytes that `ids` [count] stand for to `text`. They are valid UTF-8 if the ids are those of a whole text.
 * An id outside the vocabulary is an error; `text` then holds what it held before. */
int mt_tokenizer_decode(const mt_tokenizer *tokenizer, const int32_t *ids, int64_t count, mt_text *text,
                        mt_error *error);

/* A decoder that stands at the start of a text; the tokenizer must outlive it. */
mt_decoder *mt_decoder_open(const mt_tokenizer *tokenizer);
void mt_decoder_close(mt_decoder *decoder);

/* Appends the characters that `id` completes, perhaps none; bytes that no character can begin with become U+FFFD. */
int mt_decode_next(mt_decoder *decoder, int32_t id, mt_text *text, mt_error *error);

/* Ends the text: a character cut short becomes U+FFFD. The decoder then stands at the start of a new text. */
void mt_decode_end(mt_decoder *decoder, mt_text *text);

#endif
