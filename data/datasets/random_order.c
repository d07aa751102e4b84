/* random_order.c: see random_order.h. */
#include "random_order.h"

void mt_mt19937_seed(mt_mt19937 *random, uint32_t seed) {
    random->state[0] = seed;
    for (uint32_t i = 1; i < 624; i++) {
        uint32_t previous = random->state[i - 1];
        random->state[i] = 1812433253u * (previous ^ (previous >> 30)) + i;
    }
    random->position = 624;
}

static void mt19937_refill(mt_mt19937 *random) {
    uint32_t *state = random->state;
    for (int i = 0; i < 624; i++) {
        uint32_t mixed = (state[i] & 0x80000000u) | (state[(i + 1) % 624] & 0x7fffffffu);
        state[i] = state[(i + 397) % 624] ^ (mixed >> 1) ^ (mixed & 1 ? 0x9908b0dfu : 0);
    }
    random->position = 0;
}

uint32_t mt_mt19937_next(mt_mt19937 *random) {
    if (random->position == 624) mt19937_refill(random);
    uint32_t word = random->state[random->position++];
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680u;
    word ^= (word << 15) & 0xefc60000u;
    return word ^ (word >> 18);
}

/* NumPy's random_interval: uniform in [0, max]; draws under the covering bit mask until the value is at most max. */
static uint32_t numpy_interval(mt_mt19937 *random, uint32_t max) {
    uint32_t mask = max;
    for (int shift = 1; shift < 32; shift *= 2) mask |= mask >> shift;
    uint32_t value;
    do value = mt_mt19937_next(random) & mask;
    while (value > max);
    return value;
}

void mt_numpy_shuffle(mt_mt19937 *random, uint32_t *items, int64_t count) {
    for (int64_t i = count - 1; i > 0; i--) {
        uint32_t j = numpy_interval(random, (uint32_t)i);
        uint32_t item = items[i];
        items[i] = items[j];
        items[j] = item;
    }
}

void mt_torch_randperm(uint32_t *permutation, int64_t count, uint64_t seed) {
    mt_mt19937 random;
    mt_mt19937_seed(&random, (uint32_t)seed);
    if (count < UINT32_MAX / 20) {
        for (int64_t i = 0; i < count; i++) permutation[i] = (uint32_t)i;
        for (int64_t i = 0; i < count - 1; i++) {
            int64_t j = i + mt_mt19937_next(&random) % (count - i);
            uint32_t item = permutation[i];
            permutation[i] = permutation[j];
            permutation[j] = item;
        }
        return;
    }
    // PyTorch uses 64 random bits for large counts: 32 bits modulo such a count are not uniform enough.
    for (int64_t i = 0; i < count; i++) {
        uint64_t high = mt_mt19937_next(&random), low = mt_mt19937_next(&random);
        int64_t j = (int64_t)((high << 32 | low) % (uint64_t)(i + 1));
        permutation[i] = (uint32_t)i;
        permutation[i] = permutation[j];
        permutation[j] = (uint32_t)i;
    }
}
