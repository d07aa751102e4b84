/* jinja.h: chat templates that are programs in Jinja, rendered by python3-jinja2 in a process of its own. */
#ifndef MT_JINJA_H
#define MT_JINJA_H

#include "../base/file.h"

#include <jansson.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Templates of a model, and the process that renders them. */
typedef struct mt_jinja mt_jinja;

/* `templates`: an object of texts by name, with "default" and, for conversations with tools, optionally "tool_use".
 * `tokens`: the texts of special tokens by name, such as "bos_token"; templates use them. `path` names their file in
 * errors. A request may take `seconds` of processor time. Takes references of both objects; starts nothing yet. */
mt_jinja *mt_jinja_open(json_t *templates, json_t *tokens, const char *path, double seconds);

/* Asks about a conversation, after starting the process if it does not run. The request has
 *
 *   messages   as transformers.apply_chat_template takes them
 *   generates  true: the text ends with the header of a response
 *   tools, variables   optional: tool definitions; further variables of the template
 *
 * and the reply, to decref, has
 *
 *   text       the conversation as the template writes it
 *   spans      [first byte, byte behind the last, message] of each response, in order; none if it generates
 *   is_marked  true: spans are those of {% generation %} blocks. Else a response begins behind the text that the model
 *              gets to write it, and ends where its turn ends
 *
 * NULL with error: python3-jinja2 is absent; a damaged template; an error of the template's own; a conversation whose
 * responses cannot be found in the text; a rendering that takes too long. */
json_t *mt_jinja_ask(mt_jinja *jinja, const json_t *request, mt_error *error);

/* Ends the process. NULL is allowed. */
void mt_jinja_close(mt_jinja *jinja);

#ifdef __cplusplus
}
#endif
#endif
