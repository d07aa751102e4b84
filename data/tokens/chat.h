/* chat.h: chat templates: a conversation as the tokens that a model was trained on. */
#ifndef MT_CHAT_H
#define MT_CHAT_H

#include "../base/file.h"
#include "tokenizer.h"

#include <jansson.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The names of mt_chat_template after AUTO, in its order. */
#define MT_CHAT_TEMPLATES "chatml|qwen2_5|qwen3|llama3|mistral|deepseek3|plain"

/* A message of a conversation; `role` is system (the first message only), user or assistant. A template in Jinja takes
 * other roles too, and for a message without content NULL. */
typedef struct mt_chat_message {
    const char *role, *content;
    int64_t bytes; // of the content
} mt_chat_message;

typedef enum mt_chat_kind {
    MT_CHAT_TEXT,  // ordinary text
    MT_CHAT_TOKEN, // the text of one special token
    MT_CHAT_BEGIN, // no text: the tokenizer's BOS, if it puts one before a text
    MT_CHAT_END    // no text: the tokenizer's end of document
} mt_chat_kind;

/* A part of a rendered conversation: from the end of the part before to `end`. */
typedef struct mt_chat_part {
    mt_chat_kind kind;
    int64_t end;
    int32_t turn; // the message whose response this is, the token that ends it included; -1: no response
} mt_chat_part;

/* A rendered conversation. Start it as {0}; mt_chat_text_free frees its arrays. */
typedef struct mt_chat_text {
    mt_text text;
    mt_chat_part *parts;
    int64_t count, capacity;
} mt_chat_text;

/* Renders messages [count] as the template of this name does with transformers.apply_chat_template:
 *
 *   chatml      <|im_start|>ROLE\nCONTENT<|im_end|>\n
 *   qwen2_5     chatml; without a system message, Qwen2.5's own
 *   qwen3       chatml; the answer to the last question begins with its thoughts, which may be empty; earlier ones lose
 *               theirs
 *   llama3      <|begin_of_text|>, then <|start_header_id|>ROLE<|end_header_id|>\n\nCONTENT<|eot_id|>; Llama 3.0
 *   mistral     <s>, then [INST] CONTENT[/INST] and " CONTENT</s>"; Mistral-7B-Instruct-v0.3. A system message precedes
 *               the last user message, as in mistral-common
 *   deepseek3   DeepSeek-V3
 *   plain       the contents alone, verbatim; every response ends with the end of document
 *
 * `generates`: ends with the header of a response that a model is to write. Errors: a role that is unknown or in the
 * wrong place. `kind` is not AUTO. */
int mt_chat_render(mt_chat_text *out, mt_chat_template kind, const mt_chat_message *messages, int64_t count,
                   bool generates, mt_error *error);
void mt_chat_text_free(mt_chat_text *text);

/* The template above that this program in Jinja is, as published, or as mt_chat_program has it; AUTO: none of these.
 * Only the whole text counts. */
mt_chat_template mt_chat_recognise(const char *jinja);

/* A template with a tokenizer. */
typedef struct mt_chat mt_chat;

/* Opens a template, after checking that the tokenizer has its special tokens. AUTO: the one in the tokenizer's folder,
 * as it is: chat_template.jinja and additional_chat_templates, or else chat_template of tokenizer_config.json. Where it
 * is one of those above, as published, it is rendered here; else, or for a conversation with tools, by python3-jinja2
 * (jinja.h), which is started by the first such conversation. `path` is the tokenizer's file or folder; NULL: none. The
 * tokenizer must outlive the result. */
int mt_chat_open(mt_chat **out, mt_chat_template kind, const mt_tokenizer *tokenizer, const char *path,
                 mt_error *error);
void mt_chat_close(mt_chat *chat);

/* The program in Jinja that does as the template plain, for the folder of a model that was trained with it. NULL: the
 * chat has another template. */
const char *mt_chat_program(const mt_chat *chat);

/* Gives the template these variables, an object of JSON, in all conversations; --chat-template-kwargs. NULL: none.
 * Errors: no object, or a template that is not the folder's. */
int mt_chat_set_variables(mt_chat *chat, const char *json, mt_error *error);

/* The parts of a conversation beside roles and contents, which the templates of a folder take. NULL: none. */
typedef struct mt_chat_extras {
    const json_t *tools;         // a list of definitions
    const json_t *variables;     // an object: further variables of the template
    const json_t *const *fields; // [messages] objects with a message's other fields, such as "tool_calls"; or NULL
} mt_chat_extras;

/* Sets them for the next conversations, until they are set again; extras NULL: none. Their pointers must stay valid.
 * True of mt_chat_takes_extras: the template is a folder's. */
void mt_chat_set_extras(mt_chat *chat, const mt_chat_extras *extras);
bool mt_chat_takes_extras(const mt_chat *chat);

/* Appends the tokens of a conversation, and for each the message whose response it belongs to, or -1, to `turns`. A
 * token that has the end of a header and the start of a response belongs to the header, which is given when a model
 * writes the response.
 *
 * The templates above: special tokens stand only where the template puts them. Where a message holds such a text, it is
 * encoded as ordinary text, whereas transformers would make a special token of it.
 *
 * Templates in Jinja: the tokens of transformers.apply_chat_template; special tokens are recognised in contents too.
 * Responses are the {% generation %} blocks of a template that has them, whole. Else a response begins behind the text
 * that the model gets to write it, and ends with its turn, without white space behind the token that ends it; a
 * conversation whose responses are not clear in this way is an error. */
int mt_chat_encode(mt_chat *chat, const mt_chat_message *messages, int64_t count, bool generates, mt_ids *ids,
                   mt_ids *turns, mt_error *error);

/* Appends the tokens of a text for training: BOS if the tokenizer puts one there, the text, the end of document. */
int mt_chat_encode_document(mt_chat *chat, const char *text, int64_t bytes, mt_ids *ids, mt_error *error);

/* To be called once before mt_chat_end: learns the end of a response from a template in Jinja. */
int mt_chat_prepare(mt_chat *chat, mt_error *error);

/* The token that ends a response. */
int32_t mt_chat_end(const mt_chat *chat);

/* Messages with texts of their own. Start it as {0}; cut it to 0 messages and free its array. */
typedef struct mt_conversation {
    mt_chat_message *messages;
    int64_t count, capacity;
} mt_conversation;

/* Add a copy of a message, whose role is a literal; remove the messages from `count` on. */
void mt_conversation_add(mt_conversation *conversation, const char *role, const char *text, int64_t bytes);
void mt_conversation_cut(mt_conversation *conversation, int64_t count);

#ifdef __cplusplus
}
#endif
#endif
