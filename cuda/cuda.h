/* cuda.h: what the CUDA companions share. Kernels and thin launchers live in one .cu per family; each operation of the
 * table in megatron.h is mt_cuda_<operation>, and device.cu makes the table of them. */
#ifndef MT_CUDA_H
#define MT_CUDA_H

#include "../megatron.h"

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

/* A CUDA stream with what operations on it need: a workspace of its own, so that two streams never share one. */
struct mt_stream {
    cudaStream_t stream;
    cublasLtHandle_t cublas;
    void *workspace; // the caller's, on the device
    int64_t workspace_bytes;
    bool deterministic;   // choose no algorithm by measuring
    bool capturing;       // between graph_begin and graph_end
    cudaEvent_t followed; // the moment that another stream waits for
};

/* Every call is checked: a failure names the call and its place, the operation that made it, the rank and the reason,
 * and ends the job. mt_cuda_fail is that end, for any library. */
void mt_cuda_fail(const char *library, const char *call, const char *file, int line, const char *reason)
    __attribute__((noreturn));
void mt_cuda_check(cudaError_t status, const char *call, const char *file, int line);
void mt_cublas_check(cublasStatus_t status, const char *call, const char *file, int line);
#define MT_CUDA(call)   mt_cuda_check((call), #call, __FILE__, __LINE__)
#define MT_CUBLAS(call) mt_cublas_check((call), #call, __FILE__, __LINE__)
/* After a kernel launch, which returns nothing itself. */
#define MT_CUDA_LAUNCHED() mt_cuda_check(cudaGetLastError(), "kernel launch", __FILE__, __LINE__)

/* The device's properties, read once. */
const cudaDeviceProp *mt_cuda_device(void);

/* The architecture that the kernels which this binary has for the device were compiled for: 90 on Hopper, but 80 where
 * the driver makes them there from sm_80's PTX. */
int mt_cuda_kernel_arch(void);

/* Allows a launch to begin early, where that is possible; `attribute` must live as long as the config. */
static inline void mt_cuda_launch_early(cudaLaunchConfig_t *config, cudaLaunchAttribute *attribute) {
    if (mt_cuda_kernel_arch() < 90) return;
    attribute->id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute->val.programmaticStreamSerializationAllowed = 1;
    config->attrs = attribute;
    config->numAttrs = 1;
}

/* The stream's workspace, when it holds at least `bytes`; too small is a broken invariant (mt_cuda_workspace_bytes). */
void *mt_cuda_workspace(mt_stream *stream, int64_t bytes);

/* Whether NCCL works on this device; and waiting for a stream then, such that a peer's failure or the watchdog ends the
 * job rather than that this rank waits for ever. */
bool mt_cuda_comm_is_open(void);
void mt_cuda_comm_wait(cudaStream_t stream);

/* The second half of a sum over rows, in a fixed order: to[C] += the sum of the first `blocks` rows of partial[., C],
 * and more[C] += that of the `more_blocks` rows after them (none where it is NULL). */
void mt_cuda_add_partials(float *to, int64_t blocks, float *more, int64_t more_blocks, const float *partial, int64_t C,
                          mt_stream *stream);
/* rmsnorm_backward over the heads of a token, where there is a kernel for heads like these; whether there was. */
bool mt_cuda_heads_norm_backward(void *dx, float *dw, const void *dy, const void *x, const void *w, const float *rstd,
                                 int64_t T, int64_t H, int64_t D, int64_t dx_stride, int64_t dy_stride,
                                 int64_t x_stride, mt_dtype dtype, mt_stream *stream);
/* What attention by cuDNN needs of it for T tokens, H heads of D channels; 0 in a build without cuDNN. */
int64_t mt_attention_cudnn_workspace_bytes(int64_t T, int64_t H, int64_t D);

static inline cudaStream_t mt_cuda_stream(mt_stream *stream) {
    return stream ? stream->stream : (cudaStream_t)0;
}

static inline int64_t mt_divide_up(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* Prototypes of the whole table; they are C functions. */
#define MT_CUDA_PROTOTYPE(operation) extern "C" mt_##operation##_fn mt_cuda_##operation;
MT_ALL_OPERATIONS(MT_CUDA_PROTOTYPE)
#undef MT_CUDA_PROTOTYPE

/* y[T, N] = x[T, K] w^T + bias[N] (or NULL) for few rows. Returns whether it serves: up to MT_GEMV_ROWS rows whose
 * operands can be read sixteen bytes at a time; where it does not, nothing was enqueued. */
enum { MT_GEMV_ROWS = 8 };
bool mt_cuda_gemv(void *y, const void *x, const void *w, const void *bias, int64_t T, int64_t N, int64_t K,
                  mt_dtype dtype, mt_stream *stream);

/* Calls `function<float>` or `function<__nv_bfloat16>` as `dtype` says. */
#define MT_CUDA_DISPATCH(dtype, function, ...)                                                                         \
    ((dtype) == MT_F32 ? function<float>(__VA_ARGS__) : function<__nv_bfloat16>(__VA_ARGS__))

__device__ static inline float mt_to_float(float x) {
    return x;
}
__device__ static inline float mt_to_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
/* Rounds to nearest even. */
template <class T> __device__ static inline T mt_from_float(float x);
template <> __device__ inline float mt_from_float<float>(float x) {
    return x;
}
template <> __device__ inline __nv_bfloat16 mt_from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

/* Sixteen bytes of T at once: 4 floats or 8 bf16. */
template <class T> struct alignas(16) mt_vector {
    static constexpr int size = 16 / sizeof(T);
    T value[size];
};

/* Philox4x32-10, word for word mt_philox of megatron.c. */
__device__ static inline uint4 mt_cuda_philox(uint64_t key, uint64_t counter_low, uint64_t counter_high) {
    uint32_t key0 = (uint32_t)key, key1 = (uint32_t)(key >> 32);
    uint4 c = make_uint4((uint32_t)counter_low, (uint32_t)(counter_low >> 32), (uint32_t)counter_high,
                         (uint32_t)(counter_high >> 32));
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint64_t product0 = (uint64_t)0xD2511F53 * c.x, product1 = (uint64_t)0xCD9E8D57 * c.z;
        c = make_uint4((uint32_t)(product1 >> 32) ^ c.y ^ key0, (uint32_t)product1,
                       (uint32_t)(product0 >> 32) ^ c.w ^ key1, (uint32_t)product0);
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
    return c;
}

/* On Hopper and later, a kernel launched with mt_cuda_launch_early may begin before the one ahead of it in the
 * stream is done: when each of its blocks has called mt_begin_next, or ended. What it reads of that kernel's results,
 * and all that it writes, then has to come after mt_wait_for_previous. Elsewhere these do nothing. */
__device__ static inline void mt_begin_next(void) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ static inline void mt_wait_for_previous(void) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Sum and maximum over a warp; every lane gets it. */
__device__ static inline float mt_warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffff, x, lane);
    return x;
}
__device__ static inline float mt_warp_max(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, lane));
    return x;
}

#endif
