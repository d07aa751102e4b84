/* fp8.cuh: rounding to fp8 in kernels, and the largest magnitude of rounded values.
 *
 * Magnitudes are compared as integers: the bits of non-negative floats ascend with their values, infinity exceeds all
 * numbers and NaN exceeds infinity. The maximum is therefore the same in any order. */
#ifndef MT_CUDA_FP8_CUH
#define MT_CUDA_FP8_CUH

#include "vector.cuh"

#include <cuda_fp8.h>

/* Rounds to nearest even and saturates. The first is in the low byte. */
template <mt_dtype FORMAT> __device__ static inline uint32_t mt_to_fp8(float a, float b, float c, float d) {
    const __nv_fp8_interpretation_t format = FORMAT == MT_F8_E4M3 ? __NV_E4M3 : __NV_E5M2;
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, format);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, format);
    return low | high << 16;
}

/* bits[N / 4] = x times `scale` in fp8. */
template <mt_dtype FORMAT, class T, int N>
__device__ static inline void mt_pack_to_fp8(uint32_t *bits, const mt_pack<T, N> &x, float scale) {
#pragma unroll
    for (int i = 0; i < N; i += 4)
        bits[i / 4] = mt_to_fp8<FORMAT>(mt_element(x, i) * scale, mt_element(x, i + 1) * scale,
                                        mt_element(x, i + 2) * scale, mt_element(x, i + 3) * scale);
}

/* The bits of the largest magnitude of x. */
template <int N> __device__ static inline uint32_t mt_magnitude(const mt_pack<float, N> &x) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < N; i++) largest = max(largest, __float_as_uint(x.value[i]) & 0x7fffffff);
    return largest;
}
template <class T, int N> __device__ static inline uint32_t mt_magnitude(const mt_pack<T, N> &x) {
    mt_pack<T, 2> pair = {};
#pragma unroll
    for (int i = 0; i < N / 2; i++) pair.pairs[0] = __vmaxu2(pair.pairs[0], x.pairs[i] & 0x7fff7fff);
    return max(__float_as_uint(mt_element(pair, 0)), __float_as_uint(mt_element(pair, 1)));
}

/* Raises *amax to the largest magnitude of the block. All threads of the block call it. Most blocks find a larger one
 * in *amax, and only read it. */
__device__ static inline void mt_raise_amax(float *amax, uint32_t largest) {
    __shared__ uint32_t of_warp[32];
    const int threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x, warp = thread / 32;
    const int lanes = min(32, threads - warp * 32);
    largest = mt_warp_max(lanes == 32 ? 0xffffffff : (1u << lanes) - 1, largest);
    if (thread % 32 == 0) of_warp[warp] = largest;
    __syncthreads();
    if (thread > 0) return;
    for (int w = 1; w * 32 < threads; w++) largest = max(largest, of_warp[w]);
    if (largest > __float_as_uint(__ldcg(amax))) atomicMax((uint32_t *)amax, largest);
}

#endif
