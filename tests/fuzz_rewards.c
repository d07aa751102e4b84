/* fuzz_rewards.c: arbitrary bytes as responses and answers. Equal texts get 1; no byte is read outside the texts. */
#include "data/learn/rewards.h"

#include <stdlib.h>
#include <string.h>

/* A copy of exactly these bytes, so that reading past its end is an error. */
static char *copy_bytes(const uint8_t *data, size_t size) {
    char *copy = malloc(size ? size : 1);
    MT_CHECK(copy);
    memcpy(copy, data, size);
    return copy;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static mt_reward_function *exact, *number;
    static const uint8_t zero[] = "0";
    mt_error error;
    double score;
    if (!exact) MT_CHECK(mt_reward_open(&exact, MT_REWARD_EXACT, NULL, 1, &error) == 0);
    if (!number) MT_CHECK(mt_reward_open(&number, MT_REWARD_NUMBER, NULL, 1, &error) == 0);
    char *response = copy_bytes(data, size), *answer = copy_bytes(data, size), *other = copy_bytes(zero, 1);
    mt_reward_item item = {"", response, answer, 0, (int64_t)size, (int64_t)size};
    MT_CHECK(mt_rewards_compute(exact, &item, 1, &score, &error) == 0 && score == 1);
    if (mt_rewards_compute(number, &item, 1, &score, &error) == 0)
        MT_CHECK(score == 1);
    else
        MT_CHECK(error.text[0] != '\0' && !strchr(error.text, '\n'));
    item.answer = other, item.answer_bytes = 1;
    MT_CHECK(mt_rewards_compute(number, &item, 1, &score, &error) == 0 && (score == 0 || score == 1));
    free(response), free(answer), free(other);
    return 0;
}
