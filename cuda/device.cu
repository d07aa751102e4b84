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

void *mt_cuda_workspace(mt_stream *stream, int64_t bytes) {
    MT_CHECK(stream && bytes <= stream->workspace_bytes);
    return stream->workspace;
}

/* ---- memory and streams ------------------------------------------------------------------------------------------ */

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
    MT_CUDA(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault, mt_cuda_stream(stream)));
}

extern "C" void mt_cuda_memory_zero(void *memory, int64_t bytes, mt_stream *stream) {
    MT_CUDA(cudaMemsetAsync(memory, 0, (size_t)bytes, mt_cuda_stream(stream)));
}

extern "C" void mt_cuda_stream_wait(mt_stream *stream) {
    MT_CUDA(cudaStreamSynchronize(mt_cuda_stream(stream)));
}
