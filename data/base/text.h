/* text.h: splits text files into documents. */
#ifndef MT_TEXT_H
#define MT_TEXT_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The rule that splits a file into documents. Except for JSONL, every byte of the file belongs to a document, so the
 * documents in order are the file. */
typedef enum mt_text_format {
    MT_TEXT_JSONL,      // a JSON object per line, with the document in its fields
    MT_TEXT_PARAGRAPHS, // lines, up to and including the next blank lines
    MT_TEXT_LINES,      // a line with its newline
    MT_TEXT_FILE        // the whole file
} mt_text_format;

/* The end, in (text, end], of the document that begins at `text`; NULL if it may continue beyond `end`. */
const char *mt_text_document_end(mt_text_format format, const char *text, const char *end);

/* Reads one JSON object: calls `visit` with each text and the index of its key, in order. A field may be a list of
 * strings, the sequences of one document (as in Megatron). A blank line has no texts. Errors: invalid JSON, a missing
 * key, a field of another type, a nonzero return of `visit`. */
typedef int mt_jsonl_visit(void *context, int64_t key, const char *text, int64_t bytes, mt_error *error);
int mt_jsonl_read(const char *line, int64_t bytes, const mt_strings *keys, mt_jsonl_visit *visit, void *context,
                  mt_error *error);

/* Bytes of the byte-order mark that the file's text [text, end) begins with: 3 or 0. */
int64_t mt_text_mark_bytes(const char *text, const char *end);

/* True if the text has only spaces, tabs and line ends. */
bool mt_text_is_blank(const char *text, int64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
