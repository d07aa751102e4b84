/* text.h: from files of text to documents. */
#ifndef MT_TEXT_H
#define MT_TEXT_H

#include "../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How a file is cut into documents. In all but JSONL every byte of the file belongs to a document, so that documents
 * read one after another are the file again. */
typedef enum mt_text_format {
    MT_TEXT_JSONL,      // a JSON object a line, with the document in its fields
    MT_TEXT_PARAGRAPHS, // lines up to and with the next blank ones
    MT_TEXT_LINES,      // a line, with its newline
    MT_TEXT_FILE        // everything
} mt_text_format;

/* Where the document that begins at `text` ends, in (text, end], or NULL if it may go on beyond `end`. */
const char *mt_text_document_end(mt_text_format format, const char *text, const char *end);

/* Takes the texts of one JSON object: calls `visit` with each text and the index of its key, in order. A field may be a
 * list of strings, which are the sequences of one document, as Megatron has it; a line of white space has no texts.
 * Invalid JSON, a missing key and a field of another type are errors, as is a visit that does not return 0. */
typedef int mt_jsonl_visit(void *context, int64_t key, const char *text, int64_t bytes, mt_error *error);
int mt_jsonl_read(const char *line, int64_t bytes, const mt_strings *keys, mt_jsonl_visit *visit, void *context,
                  mt_error *error);

/* True for a text of nothing but spaces, tabs and ends of lines. */
bool mt_text_is_blank(const char *text, int64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
