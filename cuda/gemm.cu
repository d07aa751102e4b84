/* gemm.cu: the matrix products of linear layers by cuBLASLt, each shape's algorithm chosen by measuring it once.
 *
 * cuBLASLt counts columns first, so a row-major [rows, cols] matrix is its [cols, rows] one, and every product below is
 * written as the transpose of what megatron.h says:
 *   y^T  [N, T] = w [N, K] x^T [K, T]      stored w is [K, N]: transposed
 *   dx^T [K, T] = w^T [K, N] dy^T [N, T]   both as stored
 *   dw^T [K, N] = x^T [K, T] dy [T, N]     stored dy is [N, T]: transposed
 * fp32 operands are multiplied in fp32 (no TF32); bf16 ones accumulate in fp32. What follows a product element by
 * element is done on its sums before they are stored (an epilogue): the bias always, GELU where that is faster. */
#include "cuda.h"

#include <stdlib.h>

/* A product D[rows, cols] = epilogue(op(A) op(B) + beta D) in cuBLASLt's order; a bias is added to each row of D. */
typedef struct product {
    bool transpose_a, transpose_b, accumulate;
    cublasLtEpilogue_t epilogue;
    int64_t rows, cols, inner;
    mt_dtype dtype, out_dtype;
    uint32_t alignment; // of all its operands, which plan_for fills in: rows of a larger matrix may begin anywhere
} product;

/* What a product reads and writes. `aux`, like D, is what GELU was or is to be taken of; NULL without GELU. */
typedef struct operands {
    void *d;
    const void *a, *b, *bias;
    void *aux;
} operands;

/* A shape and what to run for it. The table only grows, while shapes are new: during the first step. */
typedef struct plan {
    product shape;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
    float milliseconds; // 0: not measured
    bool separate;      // GELU takes less time as a kernel of its own, or cuBLASLt does not have this epilogue
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
           a->epilogue == b->epilogue && a->rows == b->rows && a->cols == b->cols && a->inner == b->inner &&
           a->dtype == b->dtype && a->out_dtype == b->out_dtype && a->alignment == b->alignment;
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
    MT_CUBLAS(
        cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &s->epilogue, sizeof s->epilogue));
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

/* That of all operands, up to the 16 bytes that loads take at once. */
static uint32_t shared_alignment(const operands *o) {
    uintptr_t all = (uintptr_t)o->a | (uintptr_t)o->b | (uintptr_t)o->d | (uintptr_t)o->aux | 16;
    return (uint32_t)(all & -all);
}

static void set_pointers(const plan *p, const operands *o) {
    const int64_t stride = p->shape.rows;
    if (o->bias)
        MT_CUBLAS(
            cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &o->bias, sizeof o->bias));
    if (!o->aux) return;
    MT_CUBLAS(cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &o->aux,
                                             sizeof o->aux));
    MT_CUBLAS(
        cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &stride, sizeof stride));
}

static void multiply(const plan *p, void *d, const operands *o, const cublasLtMatmulAlgo_t *algorithm,
                     mt_stream *stream) {
    const float one = 1, beta = p->shape.accumulate ? 1 : 0;
    MT_CUBLAS(cublasLtMatmul(stream->cublas, p->operation, &one, o->a, p->a, o->b, p->b, &beta, d, p->d, d, p->d,
                             algorithm, stream->workspace, (size_t)stream->workspace_bytes, stream->stream));
}

/* Milliseconds of what `enqueue` enqueues. */
template <class Enqueue> static float measure(Enqueue enqueue, mt_stream *stream) {
    cudaEvent_t start, end;
    float milliseconds = 0;
    MT_CUDA(cudaEventCreate(&start));
    MT_CUDA(cudaEventCreate(&end));
    for (int i = 0; i < WARM_UPS; i++) enqueue();
    MT_CUDA(cudaEventRecord(start, stream->stream));
    for (int i = 0; i < TRIALS; i++) enqueue();
    MT_CUDA(cudaEventRecord(end, stream->stream));
    MT_CUDA(cudaEventSynchronize(end));
    MT_CUDA(cudaEventElapsedTime(&milliseconds, start, end));
    MT_CUDA(cudaEventDestroy(start));
    MT_CUDA(cudaEventDestroy(end));
    return milliseconds / TRIALS;
}

/* Runs the candidates on the real operands, into a buffer of its own where the result would accumulate. */
static int fastest(plan *p, const operands *o, const cublasLtMatmulHeuristicResult_t *candidates, int count,
                   mt_stream *stream) {
    void *own = NULL;
    size_t bytes = (size_t)(p->shape.rows * p->shape.cols * mt_dtype_size(p->shape.out_dtype));
    if (p->shape.accumulate && cudaMallocAsync(&own, bytes, stream->stream) != cudaSuccess) {
        cudaGetLastError(); // no room to measure: the heuristic's first choice has to do
        return 0;
    }
    if (own) MT_CUDA(cudaMemsetAsync(own, 0, bytes, stream->stream));
    int best = 0;
    p->milliseconds = 1e30f;
    for (int i = 0; i < count; i++) {
        float time = measure([&] { multiply(p, own ? own : o->d, o, &candidates[i].algo, stream); }, stream);
        if (time < p->milliseconds) p->milliseconds = time, best = i;
    }
    if (own)
        MT_CUDA(cudaFreeAsync(own, stream->stream)); // cudaFree would wait for messages that others have yet to send
    return best;
}

/* The algorithm of a plan; false where cuBLASLt does not have its GELU. */
static bool choose(plan *p, const operands *o, mt_stream *stream) {
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t candidates[CANDIDATES];
    size_t workspace = (size_t)stream->workspace_bytes;
    uint32_t align_a = alignment(o->a), align_b = alignment(o->b), align_d = alignment(o->d);
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
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(stream->cublas, p->operation, p->a, p->b, p->d, p->d,
                                                           preference, CANDIDATES, candidates, &count);
    MT_CUBLAS(cublasLtMatmulPreferenceDestroy(preference));
    if (o->aux && status == CUBLAS_STATUS_NOT_SUPPORTED) return false;
    MT_CUBLAS(status);
    MT_CHECK(count > 0);
    bool several = count > 1 || o->aux; // ways to do it, one of which is GELU by a kernel of its own
    bool measures = p->shape.cols >= MEASURED_COLUMNS && several && !stream->deterministic;
    int best = measures ? fastest(p, o, candidates, count, stream) : 0;
    p->algorithm = candidates[best].algo;
    return true;
}

/* The plan of a shape, with its pointers set; a new one if there is none. */
static plan *plan_for(const product *wanted, const operands *o, bool *is_new, mt_stream *stream) {
    product shape = *wanted;
    shape.alignment = shared_alignment(o);
    plan *p = plans;
    while (p && !same_shape(&p->shape, &shape)) p = p->next;
    *is_new = !p;
    if (*is_new) {
        p = (plan *)mt_calloc(sizeof *p);
        p->shape = shape;
        p->next = plans;
        plans = p;
        describe(p);
    }
    set_pointers(p, o);
    if (*is_new) p->separate = !choose(p, o, stream);
    return p;
}

static void run(const product *shape, void *d, const void *a, const void *b, const void *bias, mt_stream *stream) {
    bool is_new;
    operands o = {d, a, b, bias, NULL};
    plan *p = plan_for(shape, &o, &is_new, stream);
    multiply(p, d, &o, &p->algorithm, stream);
}

/* A product with GELU in its epilogue, or what `separately` enqueues for the same: the faster one where it is measured.
 */
template <class Separately>
static void run_gelu(const product *shape, const operands *o, Separately separately, mt_stream *stream) {
    bool is_new;
    plan *p = plan_for(shape, o, &is_new, stream);
    if (is_new && p->milliseconds > 0) p->separate = measure(separately, stream) < p->milliseconds;
    if (p->separate)
        separately();
    else
        multiply(p, o->d, o, &p->algorithm, stream);
}

/* ---- linear layers ----------------------------------------------------------------------------------------------- */

extern "C" void mt_cuda_linear_forward(void *y, const void *x, const void *w, const void *bias, int64_t T, int64_t N,
                                       int64_t K, mt_dtype dtype, mt_stream *stream) {
    if (mt_cuda_gemv(y, x, w, bias, T, N, K, dtype, stream)) return;
    cublasLtEpilogue_t epilogue = bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    product shape = {true, false, false, epilogue, N, T, K, dtype, dtype};
    run(&shape, y, w, x, bias, stream);
}

extern "C" void mt_cuda_linear_backward_input(void *dx, const void *dy, const void *w, int64_t T, int64_t N, int64_t K,
                                              mt_dtype dtype, mt_stream *stream) {
    product shape = {false, false, false, CUBLASLT_EPILOGUE_DEFAULT, K, T, N, dtype, dtype};
    run(&shape, dx, w, dy, NULL, stream);
}

/* GELU and its gradient as epilogues: of T N elements, forward reads 2 bytes less than a kernel of its own would, and
 * backward writes and reads 4 less. They are rounded once less too. cuBLASLt's GELU is the approximation; fp32 does
 * without, and so do rows that are not whole vectors of 16 bytes, for which its kernels are slow. */
static bool gelu_in_epilogue(int64_t N, int64_t K, mt_dtype dtype) {
    return dtype == MT_BF16 && N % 8 == 0 && K % 8 == 0;
}

extern "C" void mt_cuda_linear_gelu_forward(void *y, void *pre, const void *x, const void *w, const void *bias,
                                            int64_t T, int64_t N, int64_t K, mt_dtype dtype, mt_stream *stream) {
    auto separately = [&] {
        mt_cuda_linear_forward(pre, x, w, bias, T, N, K, dtype, stream);
        mt_cuda_gelu_forward(y, pre, T * N, true, dtype, stream);
    };
    if (T <= MT_GEMV_ROWS || !gelu_in_epilogue(N, K, dtype)) return separately();
    cublasLtEpilogue_t epilogue = bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    product shape = {true, false, false, epilogue, N, T, K, dtype, dtype};
    operands o = {y, w, x, bias, pre};
    run_gelu(&shape, &o, separately, stream);
}

extern "C" void mt_cuda_linear_backward_gelu(void *dpre, const void *dy, const void *w, const void *pre, int64_t T,
                                             int64_t N, int64_t K, mt_dtype dtype, mt_stream *stream) {
    auto separately = [&] {
        mt_cuda_linear_backward_input(dpre, dy, w, T, N, K, dtype, stream);
        mt_cuda_gelu_backward(dpre, dpre, pre, T * K, true, dtype, stream);
    };
    if (!gelu_in_epilogue(N, K, dtype)) return separately();
    product shape = {false, false, false, CUBLASLT_EPILOGUE_DGELU, K, T, N, dtype, dtype};
    operands o = {dpre, w, dy, NULL, (void *)pre};
    run_gelu(&shape, &o, separately, stream);
}

/* Products of bf16 are exact in fp32, so this is fp32 routing whatever the type of x. */
extern "C" void mt_cuda_router_logits(float *logits, const void *x, const void *w, int64_t T, int64_t E, int64_t C,
                                      mt_dtype dtype, mt_stream *stream) {
    if (T == 0) return;
    product shape = {true, false, false, CUBLASLT_EPILOGUE_DEFAULT, E, T, C, dtype, MT_F32};
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
    product shape = {false, true, accumulate, CUBLASLT_EPILOGUE_DEFAULT, K, N, T, dtype, MT_F32};
    run(&shape, dw, x, dy, NULL, stream);
    if (dbias) bias_backward(dbias, dy, T, N, dtype, stream);
}
