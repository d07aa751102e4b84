/* pace.h: how much of the prompts a step reads, so that those who write wait no longer than three of their own steps.
 * It has no clock: it is given the time of each step, and chooses the work of the next one.
 *
 * It knows nothing of a model but this: the time of a step grows at most in proportion to its work. If the step of the
 * streams takes s(n, L), of n streams with L keys in all, and prompts add e(c, K, V), of c tokens that attend to K
 * keys, V of them viewed, then with more of each
 *
 *     s(n', L') <= s(n, L) max(n'/n, L'/L)     e(c', K', V') <= e(c, K, V) max(c'/c, K'/K, V'/V)
 *
 * and so on for the patches of pictures and their pairs, by which a vision tower's time grows.
 *
 * A sum of constants and of terms in each of these has both properties, whatever its coefficients: the cost of the
 * weights that a step reads, of the products of a token, of its keys, of the logits of the vocabulary. So a step that
 * was measured bounds the next one, also where a prompt grows long, or another one begins in the middle. A picture is
 * not divided: streams may wait for one. */
#ifndef MT_PACE_H
#define MT_PACE_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A step beside prompts takes at most so many times one of the streams alone. */
#define MT_PACE_STEPS 3

enum { MT_PACE_SAMPLES = 5 };

typedef struct mt_pace {
    mt_prefill most; // in a step, where nobody writes
    struct {
        mt_streams streams;
        double seconds;
    } alone[MT_PACE_SAMPLES]; // the last steps without prompts, as a ring
    int64_t num_alone, since; // of these in all; steps since the last one
    mt_streams streams;       // of the step at hand
    mt_prefill read;          // by the last step beside streams that says more than the one before; 0 tokens: none has
    double cost;              // seconds that this took, at most
} mt_pace;

/* `most`: the limit where nobody writes, and of every step. */
mt_pace mt_pace_open(const mt_prefill *most);

/* The limit of the next step, beside these streams. Without a measured step that bounds it: one token, the least that
 * lets a prompt come to its end. 0 tokens: the streams alone are measured. */
mt_prefill mt_pace_next(mt_pace *pace, const mt_streams *streams);

/* The step after mt_pace_next read this, in so many seconds. */
void mt_pace_note(mt_pace *pace, const mt_prefill *read, double seconds);

#ifdef __cplusplus
}
#endif
#endif
