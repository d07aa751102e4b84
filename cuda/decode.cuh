/* decode.cuh: what the kernels for the layers of a decode step share (decode.cu, decode_cluster.cu): the barrier of all
 * blocks, heads of q and k, and sums of a softmax. */
#ifndef MT_CUDA_DECODE_CUH
#define MT_CUDA_DECODE_CUH

#include "decode.h"
#include "vector.cuh"

#include <cuda/atomic>

typedef __nv_bfloat16 bf16;

enum { P = 8 }; // elements of 16 bytes

static constexpr uint32_t turn = 1u << 31; // bit of the barrier's counter that changes when all blocks have arrived

__device__ static inline float rounded(float x) {
    return mt_to_float(mt_from_float<bf16>(x));
}

/* ---- the grid's barrier ------------------------------------------------------------------------------------------ */

/* A counter whose lower bits return to 0 with every turn, so it serves any number of launches. Between arrive and wait
 * a block may do what does not depend on others. The thread that counts is in a warp that copies no weights: the fence
 * before its arrival could wait for such copies. */
template <int counting> struct grid_barrier {
    cuda::atomic_ref<uint32_t, cuda::thread_scope_device> arrived;
    uint32_t last; // of the counting thread: the state of the bit before the present turn

    __device__ explicit grid_barrier(uint32_t *counter) : arrived(*counter), last(0) {
        if (threadIdx.x == counting)
            last = arrived.load(cuda::memory_order_relaxed) & turn; // cannot turn without this block
    }
    __device__ void arrive(void) {
        __syncthreads();
        if (threadIdx.x == counting)
            arrived.fetch_add(blockIdx.x == 0 ? turn - (gridDim.x - 1) : 1, cuda::memory_order_release);
    }
    __device__ void wait(void) {
        if (threadIdx.x == counting)
            while ((arrived.load(cuda::memory_order_acquire) & turn) == last)
                ;
        last ^= turn;
        __syncthreads();
    }
};

/* A warp's head of q or k, normalised, rotated and rounded. `pack`: this lane's 8 channels, zeros beyond the head; `x`
 * is scratch [D]. */
__device__ static inline mt_pack<bf16, P> prepare_head(const mt_decode_task &task, mt_pack<float, P> pack, float *x,
                                                       const bf16 *norm, const float *rotation) {
    int lane = threadIdx.x % 32, D = task.D, half = (int)task.rotation.R / 2;
    if (norm) {
        float squares = 0;
        for (int e = 0; e < P; e++) squares += pack.value[e] * pack.value[e];
        float rstd = rsqrtf(mt_warp_sum(squares) / D + task.qk_eps);
        mt_pack<float, P> w = mt_to_float(mt_load<P>(norm + lane * P, lane < D / P));
        for (int e = 0; e < P; e++) pack.value[e] *= rstd * w.value[e];
    }
    if (half > 0) {
        for (int e = 0; e < P && lane < D / P; e++) x[lane * P + e] = pack.value[e];
        __syncwarp();
        for (int i = lane; i < half; i += 32) {
            int low = task.rotation.interleaved ? 2 * i : i, high = low + (task.rotation.interleaved ? 1 : half);
            float a = x[low], b = x[high], c = rotation[i], s = rotation[half + i];
            x[low] = a * c - b * s, x[high] = b * c + a * s;
        }
        __syncwarp();
        for (int e = 0; e < P && lane < D / P; e++) pack.value[e] = x[lane * P + e];
        __syncwarp();
    }
    return mt_from_float<bf16>(pack);
}

/* 2^(x - base); a maximum over no keys is -inf. */
__device__ static inline float weight_of(float x, float base) {
    return x == -INFINITY ? 0 : mt_exp2(x - base);
}

/* The softmax over some keys for M heads: this lane's 8 channels. */
template <int M> struct head_sums {
    float max[M], sum[M], values[M][P];

    /* Adds U keys, given their scores (-inf: none). */
    template <int U> __device__ void add(const float (&scores)[U][M], const mt_pack<bf16, P> (&v)[U]) {
        float weights[U][M];
#pragma unroll
        for (int m = 0; m < M; m++) {
            float top = max[m];
            for (int u = 0; u < U; u++) top = mt_maximum(top, scores[u][m]);
            float shrink = weight_of(max[m], top);
            max[m] = top, sum[m] *= shrink;
            for (int e = 0; e < P; e++) values[m][e] *= shrink;
            for (int u = 0; u < U; u++) weights[u][m] = weight_of(scores[u][m], top), sum[m] += weights[u][m];
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            mt_pack<float, P> value = mt_to_float(v[u]);
            for (int m = 0; m < M; m++)
                for (int e = 0; e < P; e++) values[m][e] += weights[u][m] * value.value[e];
        }
    }

    /* Merges the sums of this lane and of lane ^ bit. */
    __device__ void join(int bit) {
#pragma unroll
        for (int m = 0; m < M; m++) {
            float top = mt_maximum(max[m], __shfl_xor_sync(0xffffffff, max[m], bit)), weight = weight_of(max[m], top);
            max[m] = top, sum[m] *= weight;
            sum[m] += __shfl_xor_sync(0xffffffff, sum[m], bit);
            for (int e = 0; e < P; e++) {
                values[m][e] *= weight;
                values[m][e] += __shfl_xor_sync(0xffffffff, values[m][e], bit);
            }
        }
    }
};

#endif
