/* random_order.h: the random numbers and orders of NumPy and PyTorch, number for number. */
#ifndef MT_RANDOM_ORDER_H
#define MT_RANDOM_ORDER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Megatron's two shuffles, bit for bit, so that the order of samples is the same. Both draw from MT19937 (Matsumoto and
 * Nishimura, "Mersenne Twister", 1998). */
typedef struct mt_mt19937 {
    uint32_t state[624];
    int position;
} mt_mt19937;

/* init_genrand and genrand_int32 of the authors' code, as in numpy.random.RandomState and torch.Generator. */
void mt_mt19937_seed(mt_mt19937 *random, uint32_t seed);
uint32_t mt_mt19937_next(mt_mt19937 *random);

/* numpy.random.RandomState.shuffle of a one-dimensional array. */
void mt_numpy_shuffle(mt_mt19937 *random, uint32_t *items, int64_t count);

/* torch.randperm(count, generator=torch.Generator().manual_seed(seed)) on the CPU. */
void mt_torch_randperm(uint32_t *permutation, int64_t count, uint64_t seed);

#ifdef __cplusplus
}
#endif
#endif
