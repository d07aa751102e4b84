/* device.cu: the device, its memory and streams, and the table of CUDA operations. */
#include "cuda.h"

#include <stdlib.h>
#include <string.h>

void mt_cuda_check(cudaError_t status, const char *call, const char *file, int line) {
    if (status == cudaSuccess) return;
    mt_die("CUDA: %s at %s:%d: %s (%s)", call, file, line, cudaGetErrorString(status), cudaGetErrorName(status));
}

void mt_cublas_check(cublasStatus_t status, const char *call, const char *file, int line) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    mt_die("cuBLASLt: %s at %s:%d: %s", call, file, line, cublasLtGetStatusString(status));
}

const cudaDeviceProp *mt_cuda_device(void) {
    static cudaDeviceProp properties;
    static bool known;
    if (!known) {
        int device;
        MT_CUDA(cudaGetDevice(&device));
        MT_CUDA(cudaGetDeviceProperties(&properties, device));
        known = true;
    }
    return &properties;
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
        if (strstr(mt_cuda_device()->name, gpu.name)) return dtype == MT_BF16 ? gpu.bf16 : gpu.fp32;
    return 0;
}

void *mt_cuda_workspace(mt_stream *stream, int64_t bytes) {
    MT_CHECK(stream && bytes <= stream->workspace_bytes);
    return stream->workspace;
}

/* ---- memory and streams ------------------------------------------------------------------------------------------ */

extern "C" int64_t mt_cuda_memory_available(void) {
    size_t free_bytes = 0, total = 0;
    MT_CUDA(cudaMemGetInfo(&free_bytes, &total));
    return (int64_t)free_bytes;
}

extern "C" void *mt_cuda_memory_alloc(int64_t bytes) {
    void *memory = NULL;
    cudaError_t status = cudaMalloc(&memory, (size_t)bytes);
    if (status == cudaErrorMemoryAllocation) {
        size_t free_bytes = 0, total = 0;
        cudaMemGetInfo(&free_bytes, &total);
        mt_die("out of GPU memory: %.2f GiB were asked for and %.2f of %.2f GiB are free; lower --micro-batch-size or "
               "--seq-length, or take a smaller model",
               (double)bytes / (1 << 30), (double)free_bytes / (1 << 30), (double)total / (1 << 30));
    }
    MT_CUDA(status);
    return memory;
}

extern "C" void mt_cuda_memory_free(void *memory) {
    MT_CUDA(cudaFree(memory));
}

extern "C" void mt_cuda_memory_copy(void *to, const void *from, int64_t bytes, mt_stream *stream) {
    if (mt_cuda_comm_is_open()) { // a copy to pageable host memory waits for the stream; do it where peers are watched
        cudaPointerAttributes attributes;
        MT_CUDA(cudaPointerGetAttributes(&attributes, to));
        if (attributes.type == cudaMemoryTypeUnregistered) mt_cuda_comm_wait(mt_cuda_stream(stream));
    }
    MT_CUDA(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault, mt_cuda_stream(stream)));
}

extern "C" void mt_cuda_memory_zero(void *memory, int64_t bytes, mt_stream *stream) {
    MT_CUDA(cudaMemsetAsync(memory, 0, (size_t)bytes, mt_cuda_stream(stream)));
}

extern "C" void mt_cuda_stream_wait(mt_stream *stream) {
    if (mt_cuda_comm_is_open()) mt_cuda_comm_wait(mt_cuda_stream(stream));
    MT_CUDA(cudaStreamSynchronize(mt_cuda_stream(stream)));
}

/* cuBLASLt runs its best Hopper kernels with 32 MiB; other operations keep partial sums there, the embedding's backward
 * its sorted tokens too, and attention's backward its fp32 gradient of q. */
extern "C" int64_t mt_cuda_workspace_bytes(int64_t T, int64_t C, int64_t H, int64_t D) {
    int64_t cublas = 32 << 20, partial_sums = 4 * 132 * 2 * C * (int64_t)sizeof(float);
    int64_t dq = T * H * D * (int64_t)sizeof(float), largest = cublas;
    int64_t embedding = T * (C / 8 + 32) + 8 * C + (1 << 20);
    if (embedding > largest) largest = embedding;
    if (partial_sums > largest) largest = partial_sums;
    if (dq > largest) largest = dq;
    return largest;
}

extern "C" mt_stream *mt_cuda_stream_create(void *workspace, int64_t workspace_bytes, bool deterministic) {
    mt_stream *stream = (mt_stream *)mt_calloc(sizeof *stream);
    stream->workspace = workspace;
    stream->workspace_bytes = workspace_bytes;
    stream->deterministic = deterministic;
    MT_CUDA(cudaStreamCreateWithFlags(&stream->stream, cudaStreamNonBlocking));
    MT_CUDA(cudaEventCreateWithFlags(&stream->followed, cudaEventDisableTiming));
    MT_CUBLAS(cublasLtCreate(&stream->cublas));
    return stream;
}

extern "C" void mt_cuda_stream_destroy(mt_stream *stream) {
    MT_CUBLAS(cublasLtDestroy(stream->cublas));
    MT_CUDA(cudaEventDestroy(stream->followed));
    MT_CUDA(cudaStreamDestroy(stream->stream));
    free(stream);
}

/* ---- events ------------------------------------------------------------------------------------------------------ */

struct mt_event {
    cudaEvent_t event;
};

extern "C" mt_event *mt_cuda_event_create(void) {
    mt_event *event = (mt_event *)mt_malloc(sizeof *event);
    MT_CUDA(cudaEventCreate(&event->event));
    return event;
}

extern "C" void mt_cuda_event_destroy(mt_event *event) {
    MT_CUDA(cudaEventDestroy(event->event));
    free(event);
}

extern "C" void mt_cuda_event_record(mt_event *event, mt_stream *stream) {
    MT_CUDA(cudaEventRecord(event->event, mt_cuda_stream(stream)));
}

extern "C" double mt_cuda_event_seconds(const mt_event *from, const mt_event *to) {
    float milliseconds;
    MT_CUDA(cudaEventSynchronize(to->event));
    MT_CUDA(cudaEventElapsedTime(&milliseconds, from->event, to->event));
    return milliseconds * 1e-3;
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

static const mt_ops cuda_ops = {"cuda",
#define MT_CUDA_ENTRY(operation) mt_cuda_##operation,
                                MT_OPERATIONS(MT_CUDA_ENTRY)
#undef MT_CUDA_ENTRY
};

extern "C" const mt_ops *mt_cuda_open(int device, mt_error *error) {
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0) {
        mt_error_set(error, "no GPU answers: %s", status == cudaSuccess ? "none is there" : cudaGetErrorString(status));
        return NULL;
    }
    if (device >= count) {
        mt_error_set(error,
                     "this host has %d GPUs and a rank of it asks for GPU %d, counted from 0; start at most one rank "
                     "for each GPU",
                     count, device);
        return NULL;
    }
    MT_CUDA(cudaSetDevice(device));
    if (mt_cuda_device()->major < 8) {
        mt_error_set(error, "GPU %d (%s) is older than compute capability 8.0; use --device cpu", device,
                     mt_cuda_device()->name);
        return NULL;
    }
    return &cuda_ops;
}
