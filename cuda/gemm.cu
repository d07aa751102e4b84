/* gemm.cu: the matrix products of linear layers by cuBLASLt, each shape's algorithm chosen by measuring it once.
 *
 * cuBLASLt counts columns first, so a row-major [rows, cols] matrix is its [cols, rows] one, and every product below is
 * written as the transpose of what megatron.h says:
 *   y^T  [N, T] = w [N, K] x^T [K, T]      stored w is [K, N]: transposed
 *   dx^T [K, T] = w^T [K, N] dy^T [N, T]   both as stored
 *   dw^T [K, N] = x^T [K, T] dy [T, N]     stored dy is [N, T]: transposed
 * fp32 operands are multiplied in fp32 (no TF32); bf16 ones accumulate in fp32. */
#include "cuda.h"

#include <stdlib.h>

/* A product D[rows, cols] = op(A) op(B) + beta D in cuBLASLt's order, with an optional bias for each row of D. */
typedef struct product {
    bool transpose_a, transpose_b, accumulate, has_bias;
    int64_t rows, cols, inner;
    mt_dtype dtype, out_dtype;
} product;

/* A shape and what to run for it. The table only grows, while shapes are new: during the first step. */
typedef struct plan {
    product shape;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
    struct plan *next;
} plan;

static plan *plans;

/* A product with fewer columns than this is decoding: many shapes, each too short to be worth measuring. */
enum { MEASURED_COLUMNS = 256, CANDIDATES = 8, WARM_UPS = 1, TRIALS = 3 };

static cudaDataType_t cuda_type(mt_dtype dtype) {
    return dtype == MT_F32 ? CUDA_R_32F : CUDA_R_16BF;
}

static bool same_shape(const product *a, const product *b) {
    return a->transpose_a == b->transpose_a && a->transpose_b == b->transpose_b && a->accumulate == b->accumulate &&
           a->has_bias == b->has_bias && a->rows == b->rows && a->cols == b->cols && a->inner == b->inner &&
           a->dtype == b->dtype && a->out_dtype == b->out_dtype;
}

static void describe(plan *p) {
    const product *s = &p->shape;
    cublasOperation_t transpose_a = s->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t transpose_b = s->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    MT_CUBLAS(cublasLtMatmulDescCreate(&p->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    MT_CUBLAS(
        cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_TRANSA, &transpose_a, sizeof transpose_a));
    MT_CUBLAS(
        cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_TRANSB, &transpose_b, sizeof transpose_b));
    if (s->has_bias) {
        cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        MT_CUBLAS(
            cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    }
    int64_t a_rows = s->transpose_a ? s->inner : s->rows, a_cols = s->transpose_a ? s->rows : s->inner;
    int64_t b_rows = s->transpose_b ? s->cols : s->inner, b_cols = s->transpose_b ? s->inner : s->cols;
    MT_CUBLAS(cublasLtMatrixLayoutCreate(&p->a, cuda_type(s->dtype), a_rows, a_cols, a_rows));
    MT_CUBLAS(cublasLtMatrixLayoutCreate(&p->b, cuda_type(s->dtype), b_rows, b_cols, b_rows));
    MT_CUBLAS(cublasLtMatrixLayoutCreate(&p->d, cuda_type(s->out_dtype), s->rows, s->cols, s->rows));
}

/* The largest power of two, up to 256, that divides an address: cuBLASLt's vector loads depend on it. */
static uint32_t alignment(const void *pointer) {
    uintptr_t address = (uintptr_t)pointer | 256;
    return (uint32_t)(address & -address);
}

static void multiply(const plan *p, void *d, const void *a, const void *b, const cublasLtMatmulAlgo_t *algorithm,
                     mt_stream *stream) {
    const float one = 1, beta = p->shape.accumulate ? 1 : 0;
    MT_CUBLAS(cublasLtMatmul(stream->cublas, p->operation, &one, a, p->a, b, p->b, &beta, d, p->d, d, p->d, algorithm,
                             stream->workspace, (size_t)stream->workspace_bytes, stream->stream));
}

/* Milliseconds of one run. */
static float measure(const plan *p, void *d, const void *a, const void *b, const cublasLtMatmulAlgo_t *algorithm,
                     cudaEvent_t start, cudaEvent_t end, mt_stream *stream) {
    float milliseconds = 0;
    for (int i = 0; i < WARM_UPS; i++) multiply(p, d, a, b, algorithm, stream);
    MT_CUDA(cudaEventRecord(start, stream->stream));
    for (int i = 0; i < TRIALS; i++) multiply(p, d, a, b, algorithm, stream);
    MT_CUDA(cudaEventRecord(end, stream->stream));
    MT_CUDA(cudaEventSynchronize(end));
    MT_CUDA(cudaEventElapsedTime(&milliseconds, start, end));
    return milliseconds / TRIALS;
}

/* Runs the candidates on the real operands, into a buffer of its own where the result would accumulate. */
static int fastest(const plan *p, void *d, const void *a, const void *b,
                   const cublasLtMatmulHeuristicResult_t *candidates, int count, mt_stream *stream) {
    void *own = NULL;
    size_t bytes = (size_t)(p->shape.rows * p->shape.cols * mt_dtype_size(p->shape.out_dtype));
    if (p->shape.accumulate && cudaMallocAsync(&own, bytes, stream->stream) != cudaSuccess) {
        cudaGetLastError(); // no room to measure: the heuristic's first choice has to do
        return 0;
    }
    if (own) MT_CUDA(cudaMemsetAsync(own, 0, bytes, stream->stream));
    cudaEvent_t start, end;
    MT_CUDA(cudaEventCreate(&start));
    MT_CUDA(cudaEventCreate(&end));
    int best = 0;
    float best_time = 1e30f;
    for (int i = 0; i < count; i++) {
        float time = measure(p, own ? own : d, a, b, &candidates[i].algo, start, end, stream);
        if (time < best_time) best_time = time, best = i;
    }
    MT_CUDA(cudaEventDestroy(start));
    MT_CUDA(cudaEventDestroy(end));
    if (own)
        MT_CUDA(cudaFreeAsync(own, stream->stream)); // cudaFree would wait for messages that others have yet to send
    return best;
}

static void choose(plan *p, void *d, const void *a, const void *b, mt_stream *stream) {
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t candidates[CANDIDATES];
    size_t workspace = (size_t)stream->workspace_bytes;
    uint32_t align_a = alignment(a), align_b = alignment(b), align_d = alignment(d);
    int count = 0;
    MT_CUBLAS(cublasLtMatmulPreferenceCreate(&preference));
    const struct {
        cublasLtMatmulPreferenceAttributes_t name;
        const void *value;
        size_t size;
    } attributes[] = {{CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
                      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align_a, sizeof align_a},
                      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align_b, sizeof align_b},
                      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align_d, sizeof align_d},
                      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align_d, sizeof align_d}};
    for (const auto &attribute : attributes)
        MT_CUBLAS(cublasLtMatmulPreferenceSetAttribute(preference, attribute.name, attribute.value, attribute.size));
    MT_CUBLAS(cublasLtMatmulAlgoGetHeuristic(stream->cublas, p->operation, p->a, p->b, p->d, p->d, preference,
                                             CANDIDATES, candidates, &count));
    MT_CHECK(count > 0);
    MT_CUBLAS(cublasLtMatmulPreferenceDestroy(preference));
    bool measures = p->shape.cols >= MEASURED_COLUMNS && count > 1 && !stream->deterministic;
    int best = measures ? fastest(p, d, a, b, candidates, count, stream) : 0;
    p->algorithm = candidates[best].algo;
}

static void run(const product *shape, void *d, const void *a, const void *b, const void *bias, mt_stream *stream) {
    plan *p = plans;
    while (p && !same_shape(&p->shape, shape)) p = p->next;
    bool is_new = !p;
    if (is_new) {
        p = (plan *)mt_calloc(sizeof *p);
        p->shape = *shape;
        p->next = plans;
        plans = p;
        describe(p);
    }
    if (bias)
        MT_CUBLAS(cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
    if (is_new) choose(p, d, a, b, stream);
    multiply(p, d, a, b, &p->algorithm, stream);
}

/* ---- linear layers ----------------------------------------------------------------------------------------------- */

extern "C" void mt_cuda_linear_forward(void *y, const void *x, const void *w, const void *bias, int64_t T, int64_t N,
                                       int64_t K, mt_dtype dtype, mt_stream *stream) {
    if (mt_cuda_gemv(y, x, w, bias, T, N, K, dtype, stream)) return;
    product shape = {true, false, false, bias != NULL, N, T, K, dtype, dtype};
    run(&shape, y, w, x, bias, stream);
}

extern "C" void mt_cuda_linear_backward_input(void *dx, const void *dy, const void *w, int64_t T, int64_t N, int64_t K,
                                              mt_dtype dtype, mt_stream *stream) {
    product shape = {false, false, false, false, K, T, N, dtype, dtype};
    run(&shape, dx, w, dy, NULL, stream);
}

/* Products of bf16 are exact in fp32, so this is fp32 routing whatever the type of x. */
extern "C" void mt_cuda_router_logits(float *logits, const void *x, const void *w, int64_t T, int64_t E, int64_t C,
                                      mt_dtype dtype, mt_stream *stream) {
    if (T == 0) return;
    product shape = {true, false, false, false, E, T, C, dtype, MT_F32};
    run(&shape, logits, w, x, NULL, stream);
}

/* A block sums 32 columns over a stretch of the tokens, 8 tokens at a time; partial is [stretches, N].
 * Moves T N elements in, and stretches N floats out. */
enum { BIAS_COLUMNS = 32, BIAS_ROWS = 8, BIAS_STRETCHES = 64 };

template <class E> __global__ void bias_partial_sums(float *partial, const E *dy, int64_t T, int64_t N) {
    __shared__ float sums[BIAS_ROWS][BIAS_COLUMNS + 1];
    int64_t column = (int64_t)blockIdx.x * BIAS_COLUMNS + threadIdx.x, stretch = (T + gridDim.y - 1) / gridDim.y;
    int64_t end = min(T, (blockIdx.y + 1) * stretch);
    float sum = 0;
    if (column < N)
        for (int64_t t = blockIdx.y * stretch + threadIdx.y; t < end; t += BIAS_ROWS)
            sum += mt_to_float(dy[t * N + column]);
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= N) return;
    for (int row = 1; row < BIAS_ROWS; row++) sum += sums[row][threadIdx.x];
    partial[blockIdx.y * N + column] = sum;
}

/* Adds the stretches in order, so that the sum repeats bit for bit. */
__global__ void bias_add_sums(float *dbias, const float *partial, int64_t stretches, int64_t N) {
    int64_t column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= N) return;
    float sum = 0;
    for (int64_t i = 0; i < stretches; i++) sum += partial[i * N + column];
    dbias[column] += sum;
}

static void bias_backward(float *dbias, const void *dy, int64_t T, int64_t N, mt_dtype dtype, mt_stream *stream) {
    int64_t stretches = mt_divide_up(T, 64);
    if (stretches > BIAS_STRETCHES) stretches = BIAS_STRETCHES;
    float *partial = (float *)mt_cuda_workspace(stream, stretches * N * (int64_t)sizeof(float));
    dim3 grid((unsigned)mt_divide_up(N, BIAS_COLUMNS), (unsigned)stretches), block(BIAS_COLUMNS, BIAS_ROWS);
    if (dtype == MT_F32)
        bias_partial_sums<<<grid, block, 0, stream->stream>>>(partial, (const float *)dy, T, N);
    else
        bias_partial_sums<<<grid, block, 0, stream->stream>>>(partial, (const __nv_bfloat16 *)dy, T, N);
    MT_CUDA_LAUNCHED();
    bias_add_sums<<<(unsigned)mt_divide_up(N, 256), 256, 0, stream->stream>>>(dbias, partial, stretches, N);
    MT_CUDA_LAUNCHED();
}

extern "C" void mt_cuda_linear_backward_weight(float *dw, float *dbias, const void *dy, const void *x, int64_t T,
                                               int64_t N, int64_t K, bool accumulate, mt_dtype dtype,
                                               mt_stream *stream) {
    product shape = {false, true, accumulate, false, K, N, T, dtype, MT_F32};
    run(&shape, dw, x, dy, NULL, stream);
    if (dbias) bias_backward(dbias, dy, T, N, dtype, stream);
}
