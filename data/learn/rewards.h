/* rewards.h: rewards of responses, for reinforcement learning: by comparing answers, by a pattern, or by a program of
 * the user's. */
#ifndef MT_REWARDS_H
#define MT_REWARDS_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The names of mt_reward_kind, in its order. */
#define MT_REWARDS "exact|number|regex|command"

/* A response to score. Texts are bytes with a length; no answer: NULL. */
typedef struct mt_reward_item {
    const char *prompt, *response, *answer;
    int64_t prompt_bytes, response_bytes, answer_bytes;
} mt_reward_item;

typedef struct mt_reward_function mt_reward_function;

/* `argument` is the pattern of regex or the command line of command; else NULL.
 *
 * number: the number of a text is that of its last \boxed{...}; or without a box that behind its last "####"; or if the
 * text is one number, perhaps with words, "x =", a currency or a unit, this one; or else, in a response or in an answer
 * of sentences, the last one. 1,000 = 1000 = 1e3 = 10^3; 3{,}5 = 3.5; 0.5 = .50 = 1/2 = \frac{1}{2}; $12 = 12. An
 * expression, such as 2\pi, x + 3, (3, 4) or \pm 5, is not computed: in a box it is no number, and none of its numbers
 * counts. A response without a number gets 0.
 *
 * regex: a PCRE2 pattern in UTF mode. If it has a group named "answer", that group of the last match must also be the
 * item's answer, as in exact. At a response that reaches PCRE2's match limit, it does not match.
 *
 * command: runs `sh -c ARGUMENT` once, now. It reads a line {"prompt": ..., "response": ..., "answer": ...} for each
 * response (a text, or null for no answer) and writes a line with one decimal number, of at most 1e30 in size, for
 * each, in order. It may read ahead, but must write out its lines without waiting for more input, within `seconds` for
 * each call of mt_rewards_compute. Its standard error is this program's. It belongs to a process group of its own, so
 * that Ctrl-C reaches it only as the end of its input.
 *
 * Errors: a missing or a bad argument; regex without PCRE2. */
int mt_reward_open(mt_reward_function **out, mt_reward_kind kind, const char *argument, double seconds,
                   mt_error *error);

/* An error if an answer has no number for the reward number to compare with. */
int mt_reward_check_number(const char *answer, int64_t bytes, mt_error *error);

/* scores[count] of the items. An error is one line that names the command, or the item. Returns MT_REWARD_STOPPED if a
 * signal requests a stop (mt_stop_requested) before a command has answered. After that or an error of a command, the
 * command has been ended, and further calls fail. */
enum { MT_REWARD_STOPPED = 1 };
int mt_rewards_compute(mt_reward_function *reward, const mt_reward_item *items, int64_t count, double *scores,
                       mt_error *error);

/* Ends the command: closes its input, waits for two seconds, then kills it and the processes of its group. NULL is
 * allowed. */
void mt_reward_close(mt_reward_function *reward);

#ifdef __cplusplus
}
#endif
#endif
