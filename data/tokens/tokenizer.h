/* tokenizer.h: text to token ids and back.
 *
 *   mt_tokenizer  the vocabulary and its rules; immutable once open, so any number of threads may share it
 *   mt_encoder    one thread's working memory for encoding (word cache, regular-expression state)
 *   mt_decoder    turns ids that arrive one at a time into whole UTF-8 characters, for generation
 *
 * Formats: Hugging Face tokenizer.json with a BPE model (byte-level as GPT-2, Qwen and Llama 3; metaspace with byte
 * fallback as Llama 2), GPT-2's vocab.json + merges.txt, SentencePiece .model (BPE and unigram), tiktoken.model as Kimi
 * and Moonlight have it, and raw bytes. The ids equal those of the `tokenizers`, `sentencepiece` and `tiktoken`
 * libraries. An unsupported part of a file is an error that
 * names the part.
 *
 * Text is bytes with a length: NUL is an ordinary character. Invalid UTF-8 is encoded as U+FFFD, as in the reference
 * libraries: once per ill-formed sequence for tokenizer.json and GPT-2 (Python's errors="replace"), once per byte for
 * SentencePiece. ByteLevel encodes every byte as itself.
 */
#ifndef MT_TOKENIZER_H
#define MT_TOKENIZER_H

#include "../../megatron.h"

typedef struct mt_tokenizer mt_tokenizer;
typedef struct mt_encoder mt_encoder;
typedef struct mt_decoder mt_decoder;

/* Growable arrays. Start them as {0}; free(data) when done. */
typedef struct mt_ids {
    int32_t *data;
    int64_t count, capacity;
} mt_ids;

typedef struct mt_text {
    char *data;
    int64_t bytes, capacity;
} mt_text;

/* The names of mt_tokenizer_type, in its order. */
#define MT_TOKENIZER_TYPES "auto|HuggingFaceTokenizer|SentencePieceTokenizer|GPT2BPETokenizer|ByteLevel|TikTokenizer"

/* Opens a tokenizer. `type` and `path`:
 *   HuggingFaceTokenizer    tokenizer.json or tiktoken.model, or a folder that holds one
 *   SentencePieceTokenizer  a .model file, or a folder that holds tokenizer.model
 *   GPT2BPETokenizer        a folder with vocab.json and merges.txt; or "VOCAB.json,MERGES.txt"; or X-vocab.json, with
 *                           X-merges.txt beside it
 *   ByteLevel               no path: ids 0..255 are bytes, 256 ends a document
 *   TikTokenizer            a JSON list of ranks of tiktoken, as Megatron-LM has it, with its default settings: pattern
 *                           v2, 1000 special tokens, 131072 tokens in all; mt_tokenizer_open_tiktoken takes others
 *
 * A missing, damaged or unsupported file is an error. */
int mt_tokenizer_open(mt_tokenizer **out, mt_tokenizer_type type, const char *path, mt_error *error);

/* True for a vocabulary that is a list of words, as WordPiece of BERT and T5 has it, and no JSON as GPT-2's: by the
 * file's first byte, or, if it cannot be read, by a name that ends in .txt. */
bool mt_vocab_is_word_list(const char *path);

/* Settings of TikTokenizer: Megatron-LM's --tiktoken-pattern, --tiktoken-num-special-tokens and --vocab-size. */
typedef struct mt_tiktoken_settings {
    mt_tiktoken_pattern pattern;
    int64_t num_special_tokens, vocab_size; // both count the special tokens
} mt_tiktoken_settings;

/* Opens TikTokenizer, which is saved as a tokenizer.json. */
int mt_tokenizer_open_tiktoken(mt_tokenizer **out, const char *path, const mt_tiktoken_settings *settings,
                               mt_error *error);

/* Opens the tokenizer of a model folder. Looks, in this order, for: the ByteLevel marker that mt_tokenizer_save writes,
 * tokenizer.json, tokenizer.model, vocab.json with merges.txt, tiktoken.model. A folder with none is an error. */
int mt_tokenizer_open_folder(mt_tokenizer **out, const char *folder, mt_error *error);

/* True if a folder holds files of a tokenizer, of any kind. */
bool mt_folder_has_tokenizer(const char *folder);

/* The files of a folder's tokenizer, for mt_tokenizer_save and nothing else: where this program cannot open it, the
 * folder that a model is saved to has it all the same. A file that is damaged JSON is an error. */
int mt_tokenizer_keep_folder(mt_tokenizer **out, const char *folder, mt_error *error);

/* An error if a file of the tokenizer's folder is a link that leads out of it, because mt_tokenizer_save would copy
 * any file that the folder's author points to. Files that the user named and a Hugging Face cache's snapshots may be
 * links. */
int mt_tokenizer_check_links(const mt_tokenizer *tokenizer, mt_error *error);

/* Writes the files that the tokenizer was opened from (kept in memory) into an existing folder, under the names that
 * mt_tokenizer_open_folder and other libraries look for. Each file is written atomically. */
int mt_tokenizer_save(const mt_tokenizer *tokenizer, const char *folder, mt_error *error);

/* A number that two tokenizers from the same files share; 0 for NULL. */
uint64_t mt_tokenizer_fingerprint(const mt_tokenizer *tokenizer);

/* An error if the two tokenizers have a token with different texts. A special token of both may have two names; a token
 * that one of them lacks is not compared. */
int mt_tokenizer_compare(const mt_tokenizer *a, const mt_tokenizer *b, mt_error *error);

/* Frees the tokenizer; close its encoders and decoders first. NULL is allowed, here and below. */
void mt_tokenizer_close(mt_tokenizer *tokenizer);

/* Ids run from 0 to vocab_size - 1; some of them may be unused. */
int64_t mt_tokenizer_vocab_size(const mt_tokenizer *tokenizer);

/* The end-of-document token and the beginning-of-text token; -1 if the tokenizer has none. Read from the
 * tokenizer_config.json beside a tokenizer.json, else found by the usual names (</s>, <|endoftext|>, ...). */
int32_t mt_tokenizer_eod(const mt_tokenizer *tokenizer);
int32_t mt_tokenizer_bos(const mt_tokenizer *tokenizer);

/* The id of the token with this text, special or not; -1: none. */
int32_t mt_tokenizer_find(const mt_tokenizer *tokenizer, const char *text, int64_t bytes);

/* True for ids without text, such as <s> or <|im_end|>; a program that shows text skips them. */
bool mt_tokenizer_is_special(const mt_tokenizer *tokenizer, int32_t id);

/* Appends the text of `ids` [count] to `text`: valid UTF-8 if the ids are those of a whole text. An id outside the
 * vocabulary is an error and leaves `text` unchanged. */
int mt_tokenizer_decode(const mt_tokenizer *tokenizer, const int32_t *ids, int64_t count, mt_text *text,
                        mt_error *error);

/* A decoder at the start of a text; the tokenizer must outlive it. */
mt_decoder *mt_decoder_open(const mt_tokenizer *tokenizer);
void mt_decoder_close(mt_decoder *decoder);

/* Appends the characters that `id` completes (possibly none); ill-formed bytes become U+FFFD. */
int mt_decode_next(mt_decoder *decoder, int32_t id, mt_text *text, mt_error *error);

/* Ends the text: an incomplete character becomes U+FFFD. The decoder is then at the start of a new text. */
void mt_decode_end(mt_decoder *decoder, mt_text *text);

/* An empty tokenizer for a loader; `path` is for messages. */
mt_tokenizer *mt_tokenizer_new(const char *path);

#endif
