/* indexed_dataset.h: Megatron's pair of files, tokens and the position of each sequence. */
#ifndef MT_INDEXED_DATASET_H
#define MT_INDEXED_DATASET_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- indexed datasets --------------------------------------------------------------------------------------------
 *
 * PREFIX.idx, little-endian: "MMIDIDX\0\0", u64 version 1, u8 token type, u64 sequences, u64 documents + 1, then
 *   i32 length of each sequence in tokens; i64 byte offset of each in the .bin;
 *   i64 document index: document d has the sequences [entry d, entry d + 1);
 *   i8 mode of each sequence, in multimodal data only: 0 is text, others are refused.
 * PREFIX.bin: the tokens only. (Megatron-LM, megatron/core/datasets/indexed_dataset.py)
 */

/* A validated .idx in memory. The three arrays point into it and may be unaligned. */
typedef struct mt_indexed_index {
    mt_dtype dtype; // of a token: u8, i8, i16, u16, i32 or i64
    int64_t num_sequences, num_documents;
    const uint8_t *lengths;   // i32 [num_sequences]
    const uint8_t *offsets;   // i64 [num_sequences]
    const uint8_t *documents; // i64 [num_documents + 1]
    int64_t gaps, overlaps;   // sequences that begin behind the end of the one before, or before it
    int64_t first_odd;        // the first of them; -1: none
    int64_t trailing;         // bytes of the .bin behind the last byte of any sequence
} mt_indexed_index;

/* Parses and validates the `size` bytes of an .idx whose .bin has `bin_size` bytes. After success every sequence lies
 * inside the .bin, at a multiple of the token's size, and the document index ascends from 0 to num_sequences. `path` is
 * for messages; `bytes` must outlive `index`. */
int mt_indexed_index_parse(mt_indexed_index *index, const void *bytes, int64_t size, int64_t bin_size, const char *path,
                           mt_error *error);

typedef struct mt_indexed_dataset mt_indexed_dataset;

/* Maps PREFIX.bin and PREFIX.idx read-only and validates the index. */
int mt_indexed_dataset_open(mt_indexed_dataset **dataset, const char *prefix, mt_error *error);
void mt_indexed_dataset_close(mt_indexed_dataset *dataset);

/* The parsed index, and the prefix that it was opened with. */
const mt_indexed_index *mt_indexed_dataset_index(const mt_indexed_dataset *dataset);
const char *mt_indexed_dataset_prefix(const mt_indexed_dataset *dataset);

/* The fingerprint of both files: of the whole index, and of pieces of the tokens. */
uint64_t mt_indexed_dataset_fingerprint(const mt_indexed_dataset *dataset);

/* Number of tokens of a sequence. */
int64_t mt_indexed_dataset_length(const mt_indexed_dataset *dataset, int64_t sequence);

/* An error if the .bin has become shorter: the end of its last page would read as zeros. Called once for each sample;
 * a read beyond that page ends the program with an error. */
int mt_indexed_dataset_check(const mt_indexed_dataset *dataset, mt_error *error);

/* Copies tokens [offset, offset + count) of a sequence; the range must lie within the sequence. A token outside
 * [0, vocab_size) is an error that names the file, the document and the token. */
int mt_indexed_dataset_get(const mt_indexed_dataset *dataset, int64_t sequence, int64_t offset, int64_t count,
                           int64_t vocab_size, int32_t *tokens, mt_error *error);

/* Writes a pair of files under temporary names until _publish renames them; a writer closed earlier removes them. The
 * index is held in memory: 4 bytes per sequence and 8 per document. */
typedef struct mt_indexed_writer mt_indexed_writer;

/* `dtype` is MT_U16 or MT_I32, see mt_indexed_dtype_for_vocab. */
int mt_indexed_writer_open(mt_indexed_writer **writer, const char *prefix, mt_dtype dtype, mt_error *error);

/* Appends one document of `num_sequences` (possibly 0) sequences that are contiguous in `tokens`. */
int mt_indexed_writer_add_document(mt_indexed_writer *writer, const int32_t *tokens, const int32_t *lengths,
                                   int64_t num_sequences, mt_error *error);

/* Writes the index and syncs both temporary files to the disk; a full disk is reported here at the latest. */
int mt_indexed_writer_seal(mt_indexed_writer *writer, mt_error *error);

/* Renames the sealed files into place. */
int mt_indexed_writer_publish(mt_indexed_writer *writer, mt_error *error);

/* Removes unpublished files and frees the writer. */
void mt_indexed_writer_close(mt_indexed_writer *writer);

/* MT_U16 if the vocabulary has under 65,500 tokens, else MT_I32 (the rule of Megatron's tool). */
mt_dtype mt_indexed_dtype_for_vocab(int64_t vocab_size);

#ifdef __cplusplus
}
#endif
#endif
