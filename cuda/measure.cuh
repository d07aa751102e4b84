/* measure.cuh: which of several implementations of a result is the fastest. */
#ifndef MT_MEASURE_CUH
#define MT_MEASURE_CUH

#include "cuda.h"

/* The index of the fastest of `count` candidates. enqueue(i) enqueues candidate i, which has run before, so that its
 * kernel is loaded. Under load a GPU changes its clock within milliseconds, so candidates that are timed one after the
 * other are timed at different clocks. Here they take turns: all in order, then all in reverse order, and again. `cold`
 * empties the caches before each call. */
template <class Enqueue> static int mt_fastest(int count, Enqueue enqueue, bool cold, mt_stream *stream) {
    enum { ROUNDS = 4, MOST = 8 };
    cudaEvent_t start[ROUNDS][MOST], end[ROUNDS][MOST];
    float total[MOST] = {};
    MT_CHECK(count <= MOST);
    for (int round = 0; round < ROUNDS; round++)
        for (int turn = 0; turn < count; turn++) {
            const int i = round % 2 ? count - 1 - turn : turn;
            MT_CUDA(cudaEventCreate(&start[round][i]));
            MT_CUDA(cudaEventCreate(&end[round][i]));
            if (cold) MT_CUDA(cudaMemsetAsync(stream->workspace, 0, (size_t)stream->workspace_bytes, stream->stream));
            MT_CUDA(cudaEventRecord(start[round][i], stream->stream));
            enqueue(i);
            MT_CUDA(cudaEventRecord(end[round][i], stream->stream));
        }
    MT_CUDA(cudaStreamSynchronize(stream->stream));
    int best = 0;
    for (int i = 0; i < count; i++) {
        for (int round = 0; round < ROUNDS; round++) {
            float milliseconds = 0;
            MT_CUDA(cudaEventElapsedTime(&milliseconds, start[round][i], end[round][i]));
            MT_CUDA(cudaEventDestroy(start[round][i]));
            MT_CUDA(cudaEventDestroy(end[round][i]));
            total[i] += milliseconds;
        }
        if (total[i] < total[best]) best = i;
    }
    return best;
}

#endif
