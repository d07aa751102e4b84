/* tool_calls.h: calls of tools in the text that a model writes: <tool_call>{"name": ..., "arguments":
 * {...}}</tool_call>, as the templates of Hermes and Qwen ask for. Other models' calls stay text. */
#ifndef MT_TOOL_CALLS_H
#define MT_TOOL_CALLS_H

#include "../base/file.h"
#include "../tokens/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Takes the calls out of a text: a list of {"id", "type", "function": {"name", "arguments"}}, whose arguments are JSON
 * as a text. NULL: there are none, or the first is no call; then the text is as it was. The ids have the number of the
 * request and the index of its choice. */
json_t *mt_tool_calls_take(mt_text *text, int64_t number, int64_t index);

/* The first byte, in [from, to), at which a call begins or may begin in a text that goes on; `to`: none. */
int64_t mt_tool_calls_begin(const char *text, int64_t from, int64_t to);

#ifdef __cplusplus
}
#endif
#endif
