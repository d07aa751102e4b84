/* device.cu: the device, its memory and streams, and the table of CUDA operations. */
#include "decode.h"

#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

/* ---- failures ---------------------------------------------------------------------------------------------------- */

/* The operation of the table that this thread is enqueueing; NULL outside of operations. */
static thread_local const char *operation_at_work;

void mt_cuda_fail(const char *library, const char *call, const char *file, int line, const char *reason) {
    mt_die("%s: %s at %s:%d, in %s, on rank %d: %s", library, call, file, line,
           operation_at_work ? operation_at_work : "no operation", mt_launch_rank(), reason);
}

static int64_t memory_limit; // bytes that the GPU seems to have; 0: all that it has

/* Bytes that are in use on the GPU, by this program, its libraries and others; *total: all bytes, or the limit. */
static int64_t memory_in_use(int64_t *total) {
    size_t free_bytes = 0, all = 0;
    cudaMemGetInfo(&free_bytes, &all);
    *total = (int64_t)all;
    if (memory_limit > 0 && memory_limit < *total) *total = memory_limit;
    return (int64_t)(all - free_bytes);
}

/* `asked`: bytes requested, or 0 if the driver or a library allocated memory for itself. */
static void __attribute__((noreturn)) out_of_memory(const char *call, const char *file, int line, int64_t asked) {
    int64_t total, used = memory_in_use(&total);
    char reason[512], wanted[128] = "internal memory was";
    if (asked > 0)
        snprintf(wanted, sizeof wanted, "%lld bytes (%.2f GiB) were", (long long)asked, (double)asked / (1 << 30));
    snprintf(reason, sizeof reason,
             "out of GPU memory: %s requested, %.2f of %.2f GiB%s are free; lower --micro-batch-size or --seq-length, "
             "take a smaller model, or end other processes on this GPU",
             wanted, (double)(used < total ? total - used : 0) / (1 << 30), (double)total / (1 << 30),
             total == memory_limit ? " of --memory-limit" : "");
    mt_cuda_fail("CUDA", call, file, line, reason);
}

/* True if a kernel enqueued earlier may be the cause: such an error is returned by whichever call comes next. */
static bool may_be_older(cudaError_t status) {
    return status == cudaErrorIllegalAddress || status == cudaErrorMisalignedAddress ||
           status == cudaErrorLaunchFailure || status == cudaErrorIllegalInstruction || status == cudaErrorAssert ||
           status == cudaErrorInvalidAddressSpace || status == cudaErrorInvalidPc || status == cudaErrorLaunchTimeout ||
           status == cudaErrorHardwareStackError;
}

void mt_cuda_check(cudaError_t status, const char *call, const char *file, int line) {
    if (status == cudaSuccess) return;
    if (status == cudaErrorMemoryAllocation) out_of_memory(call, file, line, 0);
    char reason[512];
    snprintf(reason, sizeof reason, "%s (%s)%s", cudaGetErrorString(status), cudaGetErrorName(status),
             may_be_older(status)
                 ? "; an earlier operation may be the cause; run with CUDA_LAUNCH_BLOCKING=1 to find it"
                 : "");
    mt_cuda_fail("CUDA", call, file, line, reason);
}

void mt_cublas_check(cublasStatus_t status, const char *call, const char *file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    if (status == CUBLAS_STATUS_ALLOC_FAILED) out_of_memory(call, file, line, 0);
    mt_cuda_fail("cuBLASLt", call, file, line, cublasLtGetStatusString(status));
}

/* ---- the device -------------------------------------------------------------------------------------------------- */

const cudaDeviceProp *mt_cuda_device(void) {
    static cudaDeviceProp properties;
    static bool known;
    if (!known) {
        int device;
        MT_CUDA(cudaGetDevice(&device));
        MT_CUDA(cudaGetDeviceProperties(&properties, device));
        const char *least = getenv("MT_CUDA_SHARED_KIB"); // the tests': as much as a smaller GPU has, 64 or 99
        if (least && atoi(least) > 0 && (size_t)atoi(least) * 1024 < properties.sharedMemPerBlockOptin)
            properties.sharedMemPerBlockOptin = (size_t)atoi(least) * 1024;
        known = true;
    }
    return &properties;
}

static __global__ void any_kernel(void) {
}

extern "C" int mt_cuda_kernel_arch(void) {
    static int arch;
    cudaFuncAttributes attributes;
    if (arch == 0) {
        MT_CUDA(cudaFuncGetAttributes(&attributes, any_kernel));
        arch = attributes.ptxVersion;
    }
    return arch;
}

extern "C" double mt_cuda_peak_flops(mt_dtype dtype) {
    static const struct {
        const char *name;
        double bf16, fp32;
    } gpus[] = {{"H100 PCIe", 756e12, 51e12},
                {"H100", 989.4e12, 66.9e12},
                {"H200", 989.4e12, 66.9e12},
                {"A100", 312e12, 19.5e12}};
    for (const auto &gpu : gpus)
        if (strstr(mt_cuda_device()->name, gpu.name)) return dtype == MT_F32 ? gpu.fp32 : gpu.bf16;
    return 0;
}

void *mt_cuda_workspace(mt_stream *stream, int64_t bytes) {
    MT_CHECK(stream && bytes <= stream->workspace_bytes);
    return stream->workspace;
}

/* ---- memory and streams ------------------------------------------------------------------------------------------ */

extern "C" int64_t mt_cuda_memory_available(void) {
    int64_t total, used = memory_in_use(&total);
    return used < total ? total - used : 0;
}

extern "C" void mt_cuda_memory_limit(int64_t bytes) {
    memory_limit = bytes;
}

static bool exceeds_limit(int64_t bytes) {
    return memory_limit > 0 && bytes > mt_cuda_memory_available();
}

extern "C" void *mt_cuda_memory_alloc(int64_t bytes) {
    void *memory = NULL;
    cudaError_t status = exceeds_limit(bytes) ? cudaErrorMemoryAllocation : cudaMalloc(&memory, (size_t)bytes);
    if (status == cudaErrorMemoryAllocation) out_of_memory("cudaMalloc", __FILE__, __LINE__, bytes);
    mt_cuda_check(status, "cudaMalloc", __FILE__, __LINE__);
    return memory;
}

extern "C" void *mt_cuda_memory_alloc_cache(int64_t bytes) {
    return mt_cuda_memory_alloc(bytes);
}

extern "C" void mt_cuda_memory_free(void *memory) {
    MT_CUDA(cudaFree(memory));
}

/* Idle memory of the pool of cudaMallocAsync goes back to the GPU before an allocation counts as too large: at once,
 * and if that is not enough, after the stream's work. */
static bool exceeds_limit_ordered(int64_t bytes, mt_stream *stream) {
    cudaMemPool_t pool;
    int device;
    if (!exceeds_limit(bytes)) return false;
    MT_CUDA(cudaGetDevice(&device));
    MT_CUDA(cudaDeviceGetDefaultMemPool(&pool, device));
    MT_CUDA(cudaMemPoolTrimTo(pool, 0));
    if (!exceeds_limit(bytes)) return false;
    mt_cuda_stream_synchronize(stream);
    MT_CUDA(cudaMemPoolTrimTo(pool, 0));
    return exceeds_limit(bytes);
}

extern "C" void *mt_cuda_memory_alloc_ordered(int64_t bytes, mt_stream *stream) {
    void *memory = NULL;
    cudaError_t status = exceeds_limit_ordered(bytes, stream)
                             ? cudaErrorMemoryAllocation
                             : cudaMallocAsync(&memory, (size_t)bytes, mt_cuda_stream(stream));
    if (status == cudaErrorMemoryAllocation) out_of_memory("cudaMallocAsync", __FILE__, __LINE__, bytes);
    mt_cuda_check(status, "cudaMallocAsync", __FILE__, __LINE__);
    return memory;
}

extern "C" void mt_cuda_memory_free_ordered(void *memory, mt_stream *stream) {
    MT_CUDA(cudaFreeAsync(memory, mt_cuda_stream(stream)));
}

/* The tests': MT_CUDA_PINNED_MIB is the size of a block above which none is pinned, as under WSL2. */
static cudaError_t allocate_pinned(void **memory, int64_t bytes) {
    const char *most = getenv("MT_CUDA_PINNED_MIB");
    if (most && bytes > (int64_t)atoi(most) << 20) return cudaErrorMemoryAllocation;
    return cudaMallocHost(memory, (size_t)bytes);
}

/* Host memory that is not pinned. No kernel and no cudaMemset takes it, and cudaMemcpyAsync reads it at once, before
 * the stream's work, which may write it (cudaLaunchHostFunc). */
enum { MOST_PAGEABLE = 64 };
static struct {
    char *begin;
    int64_t bytes;
} pageable[MOST_PAGEABLE];
static int num_pageable;

bool mt_cuda_is_pageable(const void *memory) {
    for (int i = 0; i < num_pageable; i++)
        if ((const char *)memory >= pageable[i].begin && (const char *)memory < pageable[i].begin + pageable[i].bytes)
            return true;
    return false;
}

extern "C" void *mt_cuda_memory_alloc_host(int64_t bytes) {
    static bool reported;
    void *memory = NULL;
    char line[256], reason[512];
    struct utsname system = {};
    cudaError_t status = allocate_pinned(&memory, bytes);
    if (status != cudaErrorMemoryAllocation) {
        mt_cuda_check(status, "cudaMallocHost", __FILE__, __LINE__);
        return memory;
    }
    cudaGetLastError(); // no later call returns it
    uname(&system);
    if (!mt_pageable_serves(line, sizeof line, bytes, system.release) || num_pageable == MOST_PAGEABLE) {
        snprintf(reason, sizeof reason,
                 "%lld bytes of host memory cannot be pinned; end other programs, or raise the host's memory (under "
                 "WSL2 in .wslconfig)",
                 (long long)bytes);
        mt_cuda_fail("CUDA", "cudaMallocHost", __FILE__, __LINE__, reason);
    }
    if (!reported) fprintf(stderr, "rank %d: %s\n", mt_launch_rank(), line);
    reported = true;
    memory = mt_cpu_ops.memory_alloc_host(bytes);
    pageable[num_pageable].begin = (char *)memory, pageable[num_pageable++].bytes = bytes;
    return memory;
}

extern "C" void mt_cuda_memory_free_host(void *memory) {
    int i = 0;
    while (i < num_pageable && pageable[i].begin != memory) i++;
    if (i == num_pageable) {
        MT_CUDA(cudaFreeHost(memory));
        return;
    }
    mt_cpu_ops.memory_free_host(memory);
    pageable[i] = pageable[--num_pageable];
}

/* A copy to pageable host memory blocks: waits first, where peers are watched. A copy from it begins with the stream's
 * earlier work done. */
static void wait_before_copy(const void *to, const void *from, mt_stream *stream) {
    if (mt_cuda_is_pageable(from)) mt_cuda_stream_synchronize(stream);
    if (!mt_cuda_comm_is_open()) return;
    cudaPointerAttributes attributes;
    MT_CUDA(cudaPointerGetAttributes(&attributes, to));
    if (attributes.type == cudaMemoryTypeUnregistered) mt_cuda_comm_wait(mt_cuda_stream(stream));
}

extern "C" void mt_cuda_memory_copy(void *to, const void *from, int64_t bytes, mt_stream *stream) {
    wait_before_copy(to, from, stream);
    MT_CUDA(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault, mt_cuda_stream(stream)));
}

extern "C" void mt_cuda_memory_copy_rows(void *to, int64_t to_stride, const void *from, int64_t from_stride,
                                         int64_t rows, int64_t bytes, mt_stream *stream) {
    if (rows == 0 || bytes == 0) return;
    if (rows == 1) {
        mt_cuda_memory_copy(to, from, bytes, stream);
        return;
    }
    wait_before_copy(to, from, stream);
    MT_CUDA(cudaMemcpy2DAsync(to, (size_t)to_stride, from, (size_t)from_stride, (size_t)bytes, (size_t)rows,
                              cudaMemcpyDefault, mt_cuda_stream(stream)));
}

extern "C" void mt_cuda_memory_zero(void *memory, int64_t bytes, mt_stream *stream) {
    if (mt_cuda_is_pageable(memory)) {
        mt_cuda_stream_synchronize(stream);
        memset(memory, 0, (size_t)bytes);
        return;
    }
    MT_CUDA(cudaMemsetAsync(memory, 0, (size_t)bytes, mt_cuda_stream(stream)));
}

extern "C" void mt_cuda_stream_synchronize(mt_stream *stream) {
    if (mt_cuda_comm_is_open()) mt_cuda_comm_wait(mt_cuda_stream(stream));
    MT_CUDA(cudaStreamSynchronize(mt_cuda_stream(stream)));
}

/* cuBLASLt needs 32 MiB for its fastest Hopper kernels. Other operations keep here: partial sums; the embedding's
 * backward its sorted tokens; attention's backward its fp32 gradient of q with two numbers of each row, an eighth
 * more for partial tiles of packed sequences (many short ones need more and take another kernel), or the workspace of
 * cuDNN. */
/* A kernel of cuBLASLt is loaded at its first launch, which may wait for all work of the GPU. */
extern "C" bool mt_cuda_first_use_waits(void) {
    return true;
}

extern "C" int64_t mt_cuda_workspace_bytes(int64_t T, int64_t C, int64_t H, int64_t D) {
    int64_t cublas = 32 << 20, partial_sums = 4ll * mt_cuda_device()->multiProcessorCount * 2 * C * 4;
    int64_t dq = T * H * (D + D / 8 + 4) * (int64_t)sizeof(float), largest = cublas;
    int64_t embedding = T * (C / 4 + 32) + 8 * C + (4 << 20);
    if (embedding > largest) largest = embedding;
    if (partial_sums > largest) largest = partial_sums;
    if (dq > largest) largest = dq;
    int64_t cudnn = mt_attention_cudnn_workspace_bytes(T, H, D);
    if (cudnn > largest) largest = cudnn;
    return largest;
}

extern "C" int64_t mt_cuda_delta_workspace_bytes(int64_t T, const mt_delta_args *a, mt_dtype dtype, bool train) {
    return mt_cuda_delta_workspace(T, a, dtype, train);
}

extern "C" int64_t mt_cuda_ssd_workspace_bytes(int64_t T, const mt_ssd_args *a, bool train) {
    return mt_cuda_ssd_workspace(T, a, train);
}

extern "C" int64_t mt_cuda_sparse_workspace_bytes(int64_t T, int64_t longest, int64_t topk) {
    return mt_cuda_sparse_workspace(T, longest, topk);
}

extern "C" mt_stream *mt_cuda_stream_create(void *workspace, int64_t workspace_bytes, bool deterministic) {
    mt_stream *stream = (mt_stream *)mt_calloc(sizeof *stream);
    stream->workspace = workspace;
    stream->workspace_bytes = workspace_bytes;
    stream->deterministic = deterministic;
    MT_CUDA(cudaStreamCreateWithFlags(&stream->stream, cudaStreamNonBlocking));
    MT_CUDA(cudaEventCreateWithFlags(&stream->wait_event, cudaEventDisableTiming));
    MT_CUBLAS(cublasLtCreate(&stream->cublas));
    stream->zeros = mt_cuda_memory_alloc(mt_zeros_bytes);
    mt_cuda_memory_zero(stream->zeros, mt_zeros_bytes, stream);
    return stream;
}

extern "C" void mt_cuda_stream_destroy(mt_stream *stream) {
    MT_CUBLAS(cublasLtDestroy(stream->cublas));
    MT_CUDA(cudaEventDestroy(stream->wait_event));
    MT_CUDA(cudaStreamDestroy(stream->stream));
    mt_cuda_memory_free(stream->zeros);
    free(stream);
}

extern "C" void mt_cuda_stream_call_host(mt_stream *stream, mt_host_function *function, void *context) {
    MT_CUDA(cudaLaunchHostFunc(mt_cuda_stream(stream), function, context));
}

/* ---- events ------------------------------------------------------------------------------------------------------ */

struct mt_event {
    cudaEvent_t event;
    int device;
};

extern "C" mt_event *mt_cuda_event_create(void) {
    mt_event *event = (mt_event *)mt_malloc(sizeof *event);
    MT_CUDA(cudaEventCreate(&event->event));
    MT_CUDA(cudaGetDevice(&event->device));
    return event;
}

extern "C" void mt_cuda_event_destroy(mt_event *event) {
    MT_CUDA(cudaEventDestroy(event->event));
    free(event);
}

extern "C" void mt_cuda_event_record(mt_event *event, mt_stream *stream) {
    MT_CUDA(cudaEventRecord(event->event, mt_cuda_stream(stream)));
}

extern "C" void mt_cuda_event_synchronize(mt_event *event) {
    MT_CUDA(cudaSetDevice(event->device)); // a new thread starts on device 0 and would create a context there
    MT_CUDA(cudaEventSynchronize(event->event));
}

extern "C" double mt_cuda_event_seconds(const mt_event *from, const mt_event *to) {
    float milliseconds;
    MT_CUDA(cudaEventSynchronize(to->event));
    MT_CUDA(cudaEventElapsedTime(&milliseconds, from->event, to->event));
    return milliseconds * 1e-3;
}

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

struct mt_graph {
    cudaGraphExec_t graph;
    void *decode; // see mt_decode_end
};

extern "C" void mt_cuda_graph_begin(mt_stream *stream, bool decodes) {
    if (decodes) mt_decode_begin(stream);
    MT_CUDA(cudaStreamBeginCapture(stream->stream, cudaStreamCaptureModeThreadLocal));
    stream->capturing = true;
}

extern "C" mt_graph *mt_cuda_graph_end(mt_stream *stream) {
    cudaGraph_t captured;
    mt_graph *graph = (mt_graph *)mt_malloc(sizeof *graph);
    stream->capturing = false;
    MT_CUDA(cudaStreamEndCapture(stream->stream, &captured));
    graph->decode = mt_decode_end(stream);
    MT_CUDA(cudaGraphInstantiate(&graph->graph, captured, 0));
    MT_CUDA(cudaGraphDestroy(captured));
    return graph;
}

extern "C" void mt_cuda_graph_launch(const mt_graph *graph, mt_stream *stream) {
    MT_CUDA(cudaGraphLaunch(graph->graph, stream->stream));
}

extern "C" void mt_cuda_graph_destroy(mt_graph *graph) {
    MT_CUDA(cudaGraphExecDestroy(graph->graph));
    mt_decode_free(graph->decode);
    free(graph);
}

/* ---- the operation table ----------------------------------------------------------------------------------------- */

/* Wraps an operation for the table, so that failures inside it print its name, and captured operations are recorded. */
template <class Function, Function *function, const char *name> struct named;
template <class Result, class... Arguments, Result (*function)(Arguments...), const char *name>
struct named<Result(Arguments...), function, name> {
    struct at_work {
        const char *outer = operation_at_work;
        at_work() {
            operation_at_work = name;
        }
        ~at_work() {
            operation_at_work = outer;
        }
    };
    static Result call(Arguments... arguments) {
        at_work scope;
        bool taken = mt_decode_hook<function>::takes(arguments...);
        if constexpr (std::is_void_v<Result>)
            if (taken) return;
        return function(arguments...);
    }
};

#define MT_CUDA_NAME(name, ...) static constexpr char name_of_##name[] = #name;
MT_CUDA_OPERATIONS(MT_CUDA_NAME)
#undef MT_CUDA_NAME

/* mt_cuda_open sets the limits. */
static mt_ops cuda_ops = {"cuda",
                          true,
                          false,
                          {},
#define MT_CUDA_ENTRY(name, ...) named<mt_##name##_fn, mt_cuda_##name, name_of_##name>::call,
                          MT_CUDA_OPERATIONS(MT_CUDA_ENTRY)
#undef MT_CUDA_ENTRY
};

/* A kernel that loads at its first use may wait for messages whose sender waits for this rank. EAGER: CUDA loads the
 * kernels of this program and of NCCL when it starts. */
extern "C" void mt_cuda_prepare(int num_ranks) {
    if (num_ranks > 1) setenv("CUDA_MODULE_LOADING", "EAGER", 0);
}

extern "C" int mt_cuda_num_gpus(void) {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

/* The architecture of kernels on the current device; 0: the build has none that it loads. */
static int kernels_here(void) {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, any_kernel) == cudaSuccess) return attributes.ptxVersion;
    cudaGetLastError(); // no later call returns it
    return 0;
}

extern "C" void mt_cuda_gpu_facts(mt_gpu_facts *gpus, int count, int device) {
    for (int i = 0; i < count; i++) {
        cudaDeviceProp properties;
        int draws = 0;
        mt_gpu_facts *gpu = &gpus[i];
        MT_CUDA(cudaGetDeviceProperties(&properties, i));
        MT_CUDA(cudaDeviceGetAttribute(&draws, cudaDevAttrKernelExecTimeout, i));
        *gpu = (mt_gpu_facts){};
        snprintf(gpu->name, sizeof gpu->name, "%.79s", properties.name);
        gpu->capability = 10 * properties.major + properties.minor, gpu->draws = draws != 0;
        gpu->total = (int64_t)properties.totalGlobalMem, gpu->free = -1;
        if (i != device) continue;
        size_t free_bytes = 0, total = 0;
        gpu->kernels = kernels_here();
        if (gpu->kernels > 0) MT_CUDA(cudaMemGetInfo(&free_bytes, &total));
        if (gpu->kernels > 0) gpu->free = (int64_t)free_bytes, gpu->total = (int64_t)total;
    }
}

extern "C" const mt_ops *mt_cuda_open(int device, mt_error *error) {
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
        mt_error_set(error, "no GPU answers: %s", status == cudaSuccess ? "none found" : cudaGetErrorString(status));
        return NULL;
    }
    if (device >= count) {
        mt_error_set(error,
                     "this host has %d GPUs, but a rank on it needs GPU %d (counted from 0); start at most one rank "
                     "for each GPU",
                     count, device);
        return NULL;
    }
    MT_CUDA(cudaSetDevice(device));
    mt_gpu_facts gpu = {};
    snprintf(gpu.name, sizeof gpu.name, "%.79s", mt_cuda_device()->name);
    gpu.capability = 10 * mt_cuda_device()->major + mt_cuda_device()->minor, gpu.kernels = kernels_here();
    if (mt_gpu_check(&gpu, device, error) != 0) return NULL;
#ifdef MT_HAVE_CUDNN
    const bool has_cudnn = true;
#else
    const bool has_cudnn = false;
#endif
    bool has_fp8 = mt_cuda_has_fp8(gpu.capability, gpu.kernels);
    mt_cuda_set_limits(&cuda_ops.limits, (int64_t)mt_cuda_device()->sharedMemPerBlockOptin, has_fp8,
                       has_fp8 && mt_cuda_has_fp8_blocks(gpu.capability), has_cudnn);
    cuda_ops.limits.no_bf16 = gpu.kernels < 80;
    return &cuda_ops;
}
