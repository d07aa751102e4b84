/* environment.h: conversations of the model with a program of the user's (--env-command): tools, a user, a game. */
#ifndef MT_ENVIRONMENT_H
#define MT_ENVIRONMENT_H

#include "../datasets/sft.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_environment mt_environment;

/* The operands of mt_environment_open. The tokenizer must outlive it. */
typedef struct mt_environment_config {
    const char *command; // run once by `sh -c`
    double seconds;      // for its answers to a turn of all conversations
    const mt_tokenizer *tokenizer;
    const char *tokenizer_path; // as for mt_chat_open
    mt_chat_template chat_template;
    const char *chat_template_kwargs;
} mt_environment_config;

/* A response of the model in a conversation, and the environment's answer. */
typedef struct mt_env_turn {
    int64_t conversation;  // of mt_environment_begin
    const int32_t *tokens; // [count] the response, with the token that ends it
    int64_t count;
    int64_t turns_left; // responses that may still follow; 0: the environment's messages are not read
    /* the answer */
    double reward;
    mt_ids next; // tokens of its messages and of the header of the next response, to free; none: the conversation ends
} mt_env_turn;

/* Starts the command and its chat template.
 *
 * For each response it gets a line
 *
 *   {"id": 12, "messages": [...], "answer": "..." or null, "turns_left": 3}
 *
 * with all messages of the conversation, the response the last of them, and the answer of the prompt's line. It writes
 * a line for each, in any order:
 *
 *   {"id": 12, "messages": [{"role": "tool", "content": "4"}], "reward": 0.5, "done": false}
 *
 * "messages" follow the response, and the model writes the next one; with "done": true, or turns_left 0, the
 * conversation ends. "reward" (default: 0) is added up over the turns. An id is a conversation's alone in the run, and
 * the same when the run resumes. The lines of a conversation hold all that it was, so that a program needs no memory.
 *
 * Errors: a template that does not open, a command that does not start. */
int mt_environment_open(mt_environment **out, const mt_environment_config *config, mt_error *error);

/* Ends the command. NULL is allowed. */
void mt_environment_close(mt_environment *environment);

/* Begins `count` conversations with the ids first_id, first_id + 1, ... and ends those before. questions[count] have
 * their conversations, and must outlive them. */
void mt_environment_begin(mt_environment *environment, int64_t first_id, const mt_question *const *questions,
                          int64_t count);

/* Asks about responses turns[count], whose conversations ascend. The chat template writes the
 * tokens between a response and the next one, which do not depend on the response's text. Returns
 * MT_ENVIRONMENT_STOPPED if a signal requests a stop first. Errors are one line: the command ended, took too long, or
 * wrote something else; messages that the chat template refuses. */
enum { MT_ENVIRONMENT_STOPPED = 1 };
int mt_environment_step(mt_environment *environment, mt_env_turn *turns, int64_t count, mt_error *error);

/* The token behind which a response can be followed by another message. */
int32_t mt_environment_end(const mt_environment *environment);

#ifdef __cplusplus
}
#endif
#endif
