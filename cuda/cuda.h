/* cuda.h: declarations shared by the CUDA files. Each kernel family has one .cu file with kernels and thin launchers.
 * The operation `x` of the table in megatron.h is mt_cuda_x; device.cu builds the table. */
#ifndef MT_CUDA_H
#define MT_CUDA_H

#include "../megatron.h"
#include "limits.h"

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

/* The compute capability, times 10, that device code is compiled for. */
#ifdef __CUDA_ARCH__
#define MT_CUDA_KERNELS (__CUDA_ARCH__ / 10)
#else
#define MT_CUDA_KERNELS 80
#endif

/* Threads that a multiprocessor holds at once (CUDA programming guide, technical specifications per compute
 * capability). Launch bounds that ask for more blocks than that are a warning of ptxas. */
static constexpr int mt_sm_threads = MT_CUDA_KERNELS == 75                                                       ? 1024
                                     : MT_CUDA_KERNELS == 80 || (MT_CUDA_KERNELS >= 90 && MT_CUDA_KERNELS < 110) ? 2048
                                                                                                                 : 1536;
static constexpr int mt_resident_blocks(int threads, int blocks) {
    return blocks * threads < mt_sm_threads ? blocks : mt_sm_threads / threads;
}

/* A CUDA stream and the resources of its operations. Each stream has its own workspace; two streams never share one. */
struct mt_stream {
    cudaStream_t stream;
    cublasLtHandle_t cublas;
    void *workspace; // device memory, owned by the caller
    int64_t workspace_bytes;
    bool deterministic;              // do not choose algorithms by timing them
    bool capturing;                  // between graph_begin and graph_end
    struct mt_decode_record *record; // of a capture, or NULL (decode.h)
    cudaEvent_t wait_event;          // recorded when another stream starts to wait for this one
    void *zeros; // mt_zeros_bytes of device memory: zeros, which a kernel that writes there restores
};
static const int64_t mt_zeros_bytes = 64 << 10;

/* Every library call is checked. A failure prints the call and its file and line, the operation that made it, the rank
 * and the reason, and ends the job. mt_cuda_fail does this for any library. */
void mt_cuda_fail(const char *library, const char *call, const char *file, int line, const char *reason)
    __attribute__((noreturn));
void mt_cuda_check(cudaError_t status, const char *call, const char *file, int line);
void mt_cublas_check(cublasStatus_t status, const char *call, const char *file, int line);
#define MT_CUDA(call)   mt_cuda_check((call), #call, __FILE__, __LINE__)
#define MT_CUBLAS(call) mt_cublas_check((call), #call, __FILE__, __LINE__)
/* Use after a kernel launch, which returns no status itself. */
#define MT_CUDA_LAUNCHED() mt_cuda_check(cudaGetLastError(), "kernel launch", __FILE__, __LINE__)

/* The properties of the current device, read once. */
const cudaDeviceProp *mt_cuda_device(void);

/* Sets the programmatic dependent launch attribute where the device supports it. `attribute` must live as long as
 * `config`. */
static inline void mt_cuda_launch_early(cudaLaunchConfig_t *config, cudaLaunchAttribute *attribute) {
    if (mt_cuda_kernel_arch() < 90) return;
    attribute->id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute->val.programmaticStreamSerializationAllowed = 1;
    config->attrs = attribute;
    config->numAttrs = 1;
}

/* True within a block of memory_alloc_host that is not pinned: kernels cannot take it. */
bool mt_cuda_is_pageable(const void *memory);

/* The stream's workspace. It must hold at least `bytes` (see mt_cuda_workspace_bytes); a smaller one is a bug in the
 * caller. */
void *mt_cuda_workspace(mt_stream *stream, int64_t bytes);

/* mt_cuda_comm_is_open: true while at least one NCCL communicator is open. mt_cuda_comm_wait waits for a stream and
 * polls NCCL meanwhile, so that the failure of a peer or the watchdog ends the job instead of blocking this rank for
 * ever. */
bool mt_cuda_comm_is_open(void);
void mt_cuda_comm_wait(cudaStream_t stream);

/* True if a message of a pipeline is not complete. Those of a ring of context ranks do not count: every rank enqueues
 * its end before it computes, so they complete whatever the ranks do next. */
bool mt_cuda_messages_pending(void);

/* Second stage of a sum over rows, in a fixed order: to[C] += the sum of the first `blocks` rows of partial[., C];
 * more[C] += the sum of the following `more_blocks` rows (`more` may be NULL). */
void mt_cuda_add_partials(float *to, int64_t blocks, float *more, int64_t more_blocks, const float *partial, int64_t C,
                          mt_stream *stream);
/* rmsnorm_backward over the heads of a token. Returns false and enqueues nothing if no kernel serves this head
 * shape. */
bool mt_cuda_heads_norm_backward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream);
/* Workspace bytes of cuDNN attention for T tokens and H heads of D channels; 0 in a build without cuDNN. */
int64_t mt_attention_cudnn_workspace_bytes(int64_t T, int64_t H, int64_t D);

static inline cudaStream_t mt_cuda_stream(mt_stream *stream) {
    return stream ? stream->stream : (cudaStream_t)0;
}

/* Prototypes of every operation of the table, with C linkage. */
#define MT_CUDA_PROTOTYPE(name, ...) extern "C" mt_##name##_fn mt_cuda_##name;
MT_CUDA_OPERATIONS(MT_CUDA_PROTOTYPE)
#undef MT_CUDA_PROTOTYPE

/* linear_forward for few rows. Serves up to mt_gemv_rows rows whose operands allow 16-byte loads. Otherwise returns
 * false and enqueues nothing. For several rows of a large w in bf16, products on tensor cores are faster. */
static inline bool mt_gemv_is_large(int64_t N, int64_t K) {
    return N * K > 1 << 23;
}
static inline int64_t mt_gemv_rows(int64_t N, int64_t K, mt_dtype dtype) {
    return dtype == MT_BF16 && mt_gemv_is_large(N, K) ? 1 : 8;
}
bool mt_cuda_gemv(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream);
/* The same for up to 32 rows of a large w in bf16 on Hopper GPUs. serves: true if T, N and K are such. */
bool mt_gemv_hopper_serves(int64_t T, int64_t N, int64_t K);
bool mt_cuda_gemv_hopper(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream);

/* Calls function<float>, function<__nv_bfloat16> or function<__half>, depending on `dtype`. */
#define MT_CUDA_DISPATCH(dtype, function, ...)                                                                         \
    ((dtype) == MT_F32    ? function<float>(__VA_ARGS__)                                                               \
     : (dtype) == MT_BF16 ? function<__nv_bfloat16>(__VA_ARGS__)                                                       \
                          : function<__half>(__VA_ARGS__))

__device__ static inline float mt_to_float(float x) {
    return x;
}
__device__ static inline float mt_to_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}
__device__ static inline float mt_to_float(__half x) {
    return __half2float(x);
}
/* Rounds to nearest even. */
template <class T> __device__ static inline T mt_from_float(float x);
template <> __device__ inline float mt_from_float<float>(float x) {
    return x;
}
template <> __device__ inline __nv_bfloat16 mt_from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}
template <> __device__ inline __half mt_from_float<__half>(float x) {
    return __float2half_rn(x);
}

/* The sum, or the largest or smallest number, of the lanes in `mask`, for all of them. */
template <class X, class Combine> __device__ static inline X mt_warp_reduce(unsigned mask, X x, Combine combine) {
    X all = x;
    int own;
    asm("mov.u32 %0, %%laneid;" : "=r"(own));
    for (int lane = 0; lane < 32; lane++) {
        X other = __shfl_sync(mask, x, lane);
        if (mask >> lane & 1 && lane != own) all = combine(all, other);
    }
    return all;
}
__device__ static inline unsigned mt_warp_max(unsigned mask, unsigned x) {
#if MT_CUDA_KERNELS >= 80
    return __reduce_max_sync(mask, x);
#else
    return mt_warp_reduce(mask, x, [](unsigned a, unsigned b) { return a > b ? a : b; });
#endif
}
__device__ static inline int mt_warp_min(unsigned mask, int x) {
#if MT_CUDA_KERNELS >= 80
    return __reduce_min_sync(mask, x);
#else
    return mt_warp_reduce(mask, x, [](int a, int b) { return a < b ? a : b; });
#endif
}
__device__ static inline int mt_warp_sum(unsigned mask, int x) {
#if MT_CUDA_KERNELS >= 80
    return __reduce_add_sync(mask, x);
#else
    return mt_warp_reduce(mask, x, [](int a, int b) { return a + b; });
#endif
}

/* Allows a kernel this much dynamic shared memory, which a block of the device has. */
template <class Kernel> static inline void mt_cuda_take_shared(Kernel kernel, int64_t bytes) {
    MT_CHECK(bytes <= (int64_t)mt_cuda_device()->sharedMemPerBlockOptin);
    MT_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
}

/* 16 bytes of T: 4 floats, or 8 numbers of 16 bits. */
template <class T> struct alignas(16) mt_vector {
    static constexpr int size = 16 / sizeof(T);
    T value[size];
};

/* Philox4x32-10; the same function as mt_philox of megatron.c. Written as products of 64 bits it has a third more
 * instructions: the compiler adds their upper halves, which are 0. */
__device__ static inline uint4 mt_cuda_philox(uint64_t key, uint64_t counter_low, uint64_t counter_high) {
    uint32_t key0 = (uint32_t)key, key1 = (uint32_t)(key >> 32);
    uint4 c = make_uint4((uint32_t)counter_low, (uint32_t)(counter_low >> 32), (uint32_t)counter_high,
                         (uint32_t)(counter_high >> 32));
#pragma unroll
    for (int round = 0; round < 10; round++) {
        c = make_uint4(__umulhi(0xCD9E8D57, c.z) ^ c.y ^ key0, 0xCD9E8D57 * c.z, __umulhi(0xD2511F53, c.x) ^ c.w ^ key1,
                       0xD2511F53 * c.x);
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
    return c;
}

/* Converts two uniform words to two normal numbers (Box & Muller), as mt_box_muller of megatron.c. */
__device__ static inline float2 mt_cuda_box_muller(uint32_t word0, uint32_t word1) {
    double uniform0 = (word0 + 0.5) * 0x1p-32, uniform1 = (word1 + 0.5) * 0x1p-32;
    float radius = sqrtf(-2 * logf((float)uniform0)), angle = (float)(uniform1 * 6.283185307179586), sine, cosine;
    sincosf(angle, &sine, &cosine);
    return make_float2(radius * cosine, radius * sine);
}

/* Programmatic dependent launch (Hopper and later). A kernel launched with mt_cuda_launch_early may start before the
 * preceding kernel of the stream has finished: once each block of that kernel has called mt_begin_next or ended.
 * That kernel may itself have started early. Therefore the kernel must call mt_wait_for_previous before it reads the
 * results of any earlier kernel and before its first write. Positions, spans, numbers of cache rows and the tables of
 * angles may be read before, but not keys and values: only copies write them, and a kernel after a copy does not start
 * early. On older GPUs both functions do nothing. */
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

/* Starts to copy the line at `address` to L2. Unlike a load it may come before mt_wait_for_previous whatever writes the
 * line: L2 is coherent. */
__device__ static inline void mt_prefetch(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

/* The smaller and the larger of two numbers; NaN if one is NaN, which fminf and fmaxf drop. One instruction from
 * compute capability 8.0 on. */
__device__ static inline float mt_minimum(float a, float b) {
#if MT_CUDA_KERNELS >= 80
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
    return least;
#else
    return a < b || isnan(a) ? a : b;
#endif
}
__device__ static inline float mt_maximum(float a, float b) {
#if MT_CUDA_KERNELS >= 80
    float largest;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(largest) : "f"(a), "f"(b));
    return largest;
#else
    return a > b || isnan(a) ? a : b;
#endif
}

/* Sum and maximum over a warp; every lane receives the result. */
__device__ static inline float mt_warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffff, x, lane);
    return x;
}
__device__ static inline float mt_warp_max(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x = mt_maximum(x, __shfl_xor_sync(0xffffffff, x, lane));
    return x;
}

/* True for a token of padding, whose index is negative; token_index may be NULL. */
__device__ static inline bool mt_is_padding(const int64_t *token_index, int64_t t) {
    return token_index && token_index[t] < 0;
}

#endif
