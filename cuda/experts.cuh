/* experts.cuh: finds the rows of experts, whose numbers only the device knows. */
#ifndef MT_EXPERTS_CUH
#define MT_EXPERTS_CUH

#include "cuda.h"

/* The rows of experts [offsets[e], offsets[e + 1]) are cut into tiles of ROWS rows, numbered over all E experts. Finds
 * tile `index`: its expert, whose rows are [first, first + count), and the tile's first row among them. Returns false
 * beyond the last tile. All lanes of a warp call it with the same arguments. */
template <int ROWS>
__device__ static inline bool mt_find_expert_rows(const int32_t *offsets, int E, int index, int &expert, int &first,
                                                  int &count, int &row) {
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int e = 0; e < E; e += 32) {
        const bool exists = e + lane < E;
        const int begin = exists ? offsets[e + lane] : 0, end = exists ? offsets[e + lane + 1] : 0;
        const int tiles = (end - begin + ROWS - 1) / ROWS;
        int up_to = tiles;
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffff, up_to, d);
            if (lane >= d) up_to += other;
        }
        const unsigned past = __ballot_sync(0xffffffff, before + up_to > index);
        if (past) {
            const int owner = __ffs(past) - 1;
            expert = e + owner, first = __shfl_sync(0xffffffff, begin, owner);
            count = __shfl_sync(0xffffffff, end, owner) - first;
            row = (index - before - __shfl_sync(0xffffffff, up_to - tiles, owner)) * ROWS;
            return true;
        }
        before += __shfl_sync(0xffffffff, up_to, 31);
    }
    return false;
}

/* The number of tiles of the experts before `expert`. All lanes of a warp call it. */
template <int ROWS> __device__ static inline int mt_expert_tiles_before(const int32_t *offsets, int expert) {
    int tiles = 0;
    for (int e = threadIdx.x % 32; e < expert; e += 32) tiles += (offsets[e + 1] - offsets[e] + ROWS - 1) / ROWS;
    return mt_warp_sum(0xffffffff, tiles);
}

#endif
