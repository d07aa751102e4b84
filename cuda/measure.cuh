/* measure.cuh: which of several ways to compute the same result is the fastest. */
#ifndef MT_MEASURE_CUH
#define MT_MEASURE_CUH

#include "cuda.h"

/* The index of the fastest of `ways`, where enqueue(i) enqueues way i; every way has run before, so that its kernel is
 * loaded. Under load a GPU changes its clock within milliseconds. Ways that are timed one after the other would be
 * timed at different clocks, so they take turns: all in order, then all in reverse order, and again. `cold` empties the
 * caches before each call. */
template <class Enqueue> static int mt_fastest(int ways, Enqueue enqueue, bool cold, mt_stream *stream) {
    enum { ROUNDS = 4, MOST = 8 };
    cudaEvent_t start[ROUNDS][MOST], end[ROUNDS][MOST];
    float total[MOST] = {};
    MT_CHECK(ways <= MOST);
    for (int round = 0; round < ROUNDS; round++)
        for (int turn = 0; turn < ways; turn++) {
            const int way = round % 2 ? ways - 1 - turn : turn;
            MT_CUDA(cudaEventCreate(&start[round][way]));
            MT_CUDA(cudaEventCreate(&end[round][way]));
            if (cold) MT_CUDA(cudaMemsetAsync(stream->workspace, 0, (size_t)stream->workspace_bytes, stream->stream));
            MT_CUDA(cudaEventRecord(start[round][way], stream->stream));
            enqueue(way);
            MT_CUDA(cudaEventRecord(end[round][way], stream->stream));
        }
    MT_CUDA(cudaStreamSynchronize(stream->stream));
    int best = 0;
    for (int way = 0; way < ways; way++) {
        for (int round = 0; round < ROUNDS; round++) {
            float milliseconds = 0;
            MT_CUDA(cudaEventElapsedTime(&milliseconds, start[round][way], end[round][way]));
            MT_CUDA(cudaEventDestroy(start[round][way]));
            MT_CUDA(cudaEventDestroy(end[round][way]));
            total[way] += milliseconds;
        }
        if (total[way] < total[best]) best = way;
    }
    return best;
}

#endif
