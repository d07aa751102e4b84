/* gemm.cu: matrix products of linear layers through cuBLASLt. The algorithm of each shape is chosen once, by timing the
 * candidates.
 *
 * cuBLASLt is column-major: a row-major [rows, cols] matrix is its [cols, rows] matrix. Every product below is
 * therefore the transpose of the definition in megatron.h:
 *   y^T  [N, T] = w [N, K] x^T [K, T]      stored w is [K, N]: transposed
 *   dx^T [K, T] = w^T [K, N] dy^T [N, T]   both as stored
 *   dw^T [K, N] = x^T [K, T] dy [T, N]     stored dy is [N, T]: transposed
 * fp32 operands are multiplied in fp32 (no TF32). bf16 operands accumulate in fp32. Epilogues are applied to the sums
 * before they are stored: the bias always, GELU where the fused product is faster.
 *
 * fp8 operands have scales. cuBLASLt multiplies them only with the summed dimension contiguous in both (TN), in
 * multiples of 16 bytes. */
#include "cuda.h"
#include "vector.cuh"
#include "fp8.h"
#include "measure.cuh"

#include <stdlib.h>

/* A product D[rows, cols] = epilogue(op(A) op(B) + beta D), column-major. A bias is added to each row of D. */
typedef struct product {
    bool transpose_a, transpose_b, accumulate;
    cublasLtEpilogue_t epilogue;
    int64_t rows, cols, inner;
    mt_dtype a_dtype, b_dtype, out_dtype;
    int64_t a_stride, b_stride; // between columns; 0: none between two
    mt_fp8_blocks a_blocks, b_blocks;
    bool fast_sums;     // fp8: Hopper's tensor cores sum all of the inner dimension, in 14 bits of fraction
    int64_t d_stride;   // as a_stride
    uint32_t alignment; // common to all operands, set by plan_for; a slice of a larger matrix may begin at any row
    int64_t count;      // products of matrices without gaps, one after another; 0: one
    bool tf32;          // fp32 operands are rounded to TF32
} product;

/* Operands of a product. `aux` has the shape of D: the argument of GELU (output of the forward, input of the backward);
 * NULL without GELU. Scales: of fp8 operands, else NULL. */
typedef struct operands {
    void *d;
    const void *a, *b, *bias;
    void *aux;
    const float *a_scales, *b_scales;
    float scale;            // of the product; 0: 1
    const void *add = NULL; // add_scale times it is added; NULL: none
    float add_scale = 0;
} operands;

/* An algorithm that was chosen for a shape. Micro-batches may have any number of tokens: where candidates are timed,
 * all numbers between two powers of two share one choice, so that only the first steps spend time on choices. In
 * deterministic mode all numbers share the heuristic's choice for CHOSEN_TOKENS. */
typedef struct choice {
    product shape; // as shape_of_choice
    bool deterministic;
    cublasLtMatmulAlgo_t algorithm;
    bool unfused; // a separate GELU kernel is faster, or cuBLASLt does not support this epilogue or fp8 product
    struct choice *next;
} choice;

static choice *choices;

/* A shape in cuBLASLt's terms. Streams in deterministic mode have plans of their own, since another stream's choice may
 * have been timed. */
typedef struct plan {
    product shape;
    bool deterministic;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, d;
    choice *chosen;
    struct plan *next;
} plan;

/* A hash table with short lists: the plan that was created first makes room for a new one. */
enum { PLAN_LISTS = 1024, PLANS_IN_LIST = 8 };
static plan *plans[PLAN_LISTS];

/* One column is a product of a matrix and a vector, whose algorithms hardly differ. */
enum { MEASURED_COLUMNS = 2, FEW_COLUMNS = 256, CANDIDATES = 8 };
enum { CHOSEN_TOKENS = 4096, LEAST_TOKENS = 16 }; // 16: the least summed elements of an fp8 product

static cudaDataType_t cuda_type(mt_dtype dtype) {
    if (dtype == MT_F8_E4M3) return CUDA_R_8F_E4M3;
    if (dtype == MT_F8_E5M2) return CUDA_R_8F_E5M2;
    return dtype == MT_F32 ? CUDA_R_32F : dtype == MT_F16 ? CUDA_R_16F : CUDA_R_16BF;
}

static bool is_fp8(const product *shape) {
    return shape->a_dtype == MT_F8_E4M3 || shape->a_dtype == MT_F8_E5M2;
}

static bool same_shape(const product *a, const product *b) {
    return a->transpose_a == b->transpose_a && a->transpose_b == b->transpose_b && a->accumulate == b->accumulate &&
           a->epilogue == b->epilogue && a->rows == b->rows && a->cols == b->cols && a->inner == b->inner &&
           a->a_dtype == b->a_dtype && a->b_dtype == b->b_dtype && a->out_dtype == b->out_dtype &&
           a->a_stride == b->a_stride && a->b_stride == b->b_stride && a->a_blocks == b->a_blocks &&
           a->b_blocks == b->b_blocks && a->fast_sums == b->fast_sums && a->d_stride == b->d_stride &&
           a->alignment == b->alignment && a->count == b->count && a->tf32 == b->tf32;
}

/* The dimension of a product that is a number of tokens: the summed one in a weight's gradient, else the columns. */
static int64_t *tokens_of(product *shape) {
    bool of_weight = shape->transpose_b || (is_fp8(shape) && shape->out_dtype == MT_F32);
    return of_weight ? &shape->inner : &shape->cols;
}

/* True if the candidates for a shape are timed. In deterministic mode the choice must not depend on time, nor on the
 * shapes before. */
static bool is_timed(const product *shape, const mt_stream *stream) {
    return shape->cols >= MEASURED_COLUMNS && !stream->deterministic;
}

/* The same product with another number of tokens. Sums over tokens in fp8 have operands with contiguous tokens, whose
 * columns are as far apart. */
static product with_tokens(product shape, int64_t tokens) {
    int64_t *of_shape = tokens_of(&shape);
    if (is_fp8(&shape) && of_shape == &shape.inner) shape.a_stride = shape.b_stride = tokens;
    *of_shape = tokens;
    return shape;
}

/* The shape with the number of tokens rounded up to a power of two, if candidates are timed; with CHOSEN_TOKENS in
 * deterministic mode. */
static product shape_of_choice(const product *shape, const mt_stream *stream) {
    product rounded = *shape;
    if (stream->deterministic) return with_tokens(rounded, CHOSEN_TOKENS);
    int64_t *tokens = tokens_of(&rounded), power = 1;
    while (power < *tokens) power *= 2;
    if (is_timed(shape, stream)) *tokens = power;
    return rounded;
}

/* The list of a shape. */
static plan **list_of(const product *shape) {
    uint64_t hash = (uint64_t)shape->rows * 31 + (uint64_t)shape->cols;
    hash = (hash * 31 + (uint64_t)shape->inner) * 31 + (uint64_t)shape->epilogue * 8 + (uint64_t)shape->out_dtype;
    return &plans[(hash * 0x9E3779B97F4A7C15u >> 32) % PLAN_LISTS];
}

/* Scales of blocks exist since cuBLASLt 12.9; mt_fp8_cublaslt does not get here with an older one. */
static void describe_fp8(plan *p) {
    const int8_t fast = p->shape.fast_sums;
    MT_CUBLAS(cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast));
#if CUBLAS_VERSION >= 120900
    static const cublasLtMatmulMatrixScale_t modes[] = {CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F,
                                                        CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
                                                        CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F};
    const cublasLtMatmulMatrixScale_t *a = &modes[p->shape.a_blocks], *b = &modes[p->shape.b_blocks];
    MT_CUBLAS(cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, a, sizeof *a));
    MT_CUBLAS(cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, b, sizeof *b));
#endif
}

static void describe(plan *p) {
    const product *s = &p->shape;
    cublasOperation_t transpose_a = s->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasOperation_t transpose_b = s->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasComputeType_t type = s->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
    MT_CUBLAS(cublasLtMatmulDescCreate(&p->operation, type, CUDA_R_32F));
    MT_CUBLAS(
        cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_TRANSA, &transpose_a, sizeof transpose_a));
    MT_CUBLAS(
        cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_TRANSB, &transpose_b, sizeof transpose_b));
    MT_CUBLAS(
        cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_EPILOGUE, &s->epilogue, sizeof s->epilogue));
    int64_t a_rows = s->transpose_a ? s->inner : s->rows, a_cols = s->transpose_a ? s->rows : s->inner;
    int64_t b_rows = s->transpose_b ? s->cols : s->inner, b_cols = s->transpose_b ? s->inner : s->cols;
    int64_t a_stride = s->a_stride ? s->a_stride : a_rows, b_stride = s->b_stride ? s->b_stride : b_rows;
    MT_CUBLAS(cublasLtMatrixLayoutCreate(&p->a, cuda_type(s->a_dtype), a_rows, a_cols, a_stride));
    MT_CUBLAS(cublasLtMatrixLayoutCreate(&p->b, cuda_type(s->b_dtype), b_rows, b_cols, b_stride));
    MT_CUBLAS(cublasLtMatrixLayoutCreate(&p->d, cuda_type(s->out_dtype), s->rows, s->cols,
                                         s->d_stride ? s->d_stride : s->rows));
    if (is_fp8(s)) describe_fp8(p);
    if (s->count <= 1) return;
    const int32_t count = (int32_t)s->count;
    const struct {
        cublasLtMatrixLayout_t layout;
        int64_t distance;
    } layouts[] = {{p->a, a_rows * a_cols}, {p->b, b_rows * b_cols}, {p->d, s->rows * s->cols}};
    for (const auto &of : layouts) {
        MT_CUBLAS(
            cublasLtMatrixLayoutSetAttribute(of.layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
        MT_CUBLAS(cublasLtMatrixLayoutSetAttribute(of.layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &of.distance,
                                                   sizeof of.distance));
    }
}

/* The largest power of two, up to 256, that divides the address. cuBLASLt selects its vector loads by it. */
static uint32_t alignment(const void *pointer) {
    uintptr_t address = (uintptr_t)pointer | 256;
    return (uint32_t)(address & -address);
}

/* The common alignment of all operands, up to 16 bytes (the widest load). */
static uint32_t shared_alignment(const operands *o) {
    uintptr_t all = (uintptr_t)o->a | (uintptr_t)o->b | (uintptr_t)o->d | (uintptr_t)o->aux | (uintptr_t)o->add | 16;
    return (uint32_t)(all & -all);
}

static void set_pointers(const plan *p, const operands *o) {
    const int64_t stride = p->shape.rows;
    if (o->a_scales)
        MT_CUBLAS(cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &o->a_scales,
                                                 sizeof o->a_scales));
    if (o->b_scales)
        MT_CUBLAS(cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &o->b_scales,
                                                 sizeof o->b_scales));
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
    const float alpha = o->scale != 0 ? o->scale : 1, beta = p->shape.accumulate ? 1 : o->add_scale;
    const void *c = o->add ? o->add : d;
    MT_CUBLAS(cublasLtMatmul(stream->cublas, p->operation, &alpha, o->a, p->a, o->b, p->b, &beta, c, p->d, d, p->d,
                             algorithm, stream->workspace, (size_t)stream->workspace_bytes, stream->stream));
}

/* Times the candidates on the real operands and returns the index of the fastest. A product that accumulates writes to
 * a scratch buffer here. With few rows the weights come from memory, whose rate is the product's limit, so the caches
 * are emptied. */
static int fastest(plan *p, const operands *o, const cublasLtMatmulHeuristicResult_t *candidates, int count,
                   mt_stream *stream) {
    void *scratch = NULL;
    int64_t stride = p->shape.d_stride ? p->shape.d_stride : p->shape.rows;
    size_t bytes = (size_t)(stride * p->shape.cols * mt_dtype_size(p->shape.out_dtype));
    if (p->shape.accumulate && cudaMallocAsync(&scratch, bytes, stream->stream) != cudaSuccess) {
        cudaGetLastError(); // no memory for the measurement: use the heuristic's first choice
        return 0;
    }
    if (scratch) MT_CUDA(cudaMemsetAsync(scratch, 0, bytes, stream->stream));
    auto enqueue = [&](int i) { multiply(p, scratch ? scratch : o->d, o, &candidates[i].algo, stream); };
    for (int i = 0; i < count; i++) enqueue(i);
    const int best = mt_fastest(count, enqueue, p->shape.cols <= FEW_COLUMNS, stream);
    if (scratch)
        MT_CUDA(
            cudaFreeAsync(scratch, stream->stream)); // cudaFree could wait for messages that peers have not sent yet
    return best;
}

/* True if the plan's product can use the algorithm. */
static bool accepts(const plan *p, const cublasLtMatmulAlgo_t *algorithm, const mt_stream *stream) {
    cublasLtMatmulHeuristicResult_t result;
    cublasStatus_t status =
        cublasLtMatmulAlgoCheck(stream->cublas, p->operation, p->a, p->b, p->d, p->d, algorithm, &result);
    return status == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= (size_t)stream->workspace_bytes;
}

/* The heuristic's candidates for a plan; returns their number, or 0 if cuBLASLt does not support the GELU epilogue or
 * the fp8 product. */
static int find_candidates(const plan *p, cublasLtMatmulHeuristicResult_t *candidates, const operands *o,
                           mt_stream *stream) {
    cublasLtMatmulPreference_t preference;
    size_t workspace = (size_t)stream->workspace_bytes;
    // In deterministic mode the alignment that the shape names: that of these operands depends on the products before.
    bool by_shape = stream->deterministic;
    uint32_t least = (uint32_t)p->shape.alignment, align_a = by_shape ? least : alignment(o->a),
             align_b = by_shape ? least : alignment(o->b), align_d = by_shape ? least : alignment(o->d);
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
    if ((o->aux || is_fp8(&p->shape)) && status == CUBLAS_STATUS_NOT_SUPPORTED) return 0;
    MT_CUBLAS(status);
    MT_CHECK(count > 0);
    return count;
}

static plan *plan_create(const product *shape, const operands *o) {
    plan *p = (plan *)mt_calloc(sizeof *p);
    p->shape = *shape;
    describe(p);
    set_pointers(p, o);
    return p;
}

static void destroy(plan *p) {
    MT_CUBLAS(cublasLtMatrixLayoutDestroy(p->a));
    MT_CUBLAS(cublasLtMatrixLayoutDestroy(p->b));
    MT_CUBLAS(cublasLtMatrixLayoutDestroy(p->d));
    MT_CUBLAS(cublasLtMatmulDescDestroy(p->operation));
    free(p);
}

/* Chooses an algorithm by the shape alone: the heuristic's first for CHOSEN_TOKENS that few tokens can use too, where
 * there is one. Returns as choose. */
static bool choose_by_shape(const product *shape, choice *made, const operands *o, mt_stream *stream) {
    cublasLtMatmulHeuristicResult_t candidates[CANDIDATES];
    const product least = with_tokens(*shape, LEAST_TOKENS);
    plan *chosen = plan_create(shape, o), *few = plan_create(&least, o);
    const int count = find_candidates(chosen, candidates, o, stream);
    int best = 0;
    while (best < count && !accepts(few, &candidates[best].algo, stream)) best++;
    if (count > 0) made->algorithm = candidates[best < count ? best : 0].algo;
    destroy(chosen), destroy(few);
    return count > 0;
}

/* Chooses an algorithm for a plan. Returns false if cuBLASLt does not support the GELU epilogue or the fp8 product. */
static bool choose(plan *p, choice *made, const operands *o, mt_stream *stream) {
    cublasLtMatmulHeuristicResult_t candidates[CANDIDATES];
    const int count = find_candidates(p, candidates, o, stream);
    if (count == 0) return false;
    const bool timed = count > 1 && is_timed(&p->shape, stream);
    made->algorithm = candidates[timed ? fastest(p, o, candidates, count, stream) : 0].algo;
    return true;
}

/* True if the plan's product can use the algorithm of a choice. */
static bool fits(const plan *p, const choice *made, const mt_stream *stream) {
    if (made->unfused) return !is_fp8(&p->shape); // support of fp8 may depend on the number of tokens
    return accepts(p, &made->algorithm, stream);
}

/* The choice for the nearest other number of tokens that the plan's product can use; or NULL. */
static choice *choice_for_other_tokens(plan *p, product shape, const mt_stream *stream) {
    const int64_t tokens = *tokens_of(&shape);
    choice *nearest = NULL;
    double least = 0;
    for (choice *made = choices; made; made = made->next) {
        product other = made->shape;
        const double ratio = (double)tokens / (double)*tokens_of(&other), distance = ratio > 1 ? ratio : 1 / ratio;
        *tokens_of(&other) = tokens;
        if ((nearest && distance >= least) || made->deterministic || !same_shape(&other, &shape)) continue;
        if (!fits(p, made, stream)) continue;
        nearest = made, least = distance;
    }
    return nearest;
}

/* The choice that was made for a shape, if the plan's product can use it; or NULL. */
static choice *choice_made(const plan *p, const product *shape, const mt_stream *stream) {
    choice *made = choices;
    while (made &&
           !(made->deterministic == stream->deterministic && same_shape(&made->shape, shape) && fits(p, made, stream)))
        made = made->next;
    return made;
}

static choice *choice_add(const product *shape, const mt_stream *stream) {
    choice *made = (choice *)mt_calloc(sizeof *made);
    made->shape = *shape, made->deterministic = stream->deterministic, made->next = choices;
    choices = made;
    return made;
}

/* The choice for a plan; *is_new: it was made now. cuBLASLt loads a kernel when it first runs, and waits for all work
 * of the GPU then. If that includes a message whose other rank waits for this one, both wait forever; so while messages
 * of a pipeline are pending, a product takes an algorithm that has run before, if there is one. In deterministic mode,
 * where the choice must not depend on time, the first micro-batches load the algorithms for every number of tokens; a
 * number for which one is not possible has an algorithm of its own. */
static choice *choice_for(plan *p, const operands *o, bool *is_new, mt_stream *stream) {
    const product shape = shape_of_choice(&p->shape, stream);
    choice *made = choice_made(p, &shape, stream);
    if (!made && stream->deterministic) made = choice_made(p, &p->shape, stream);
    if (!made && !stream->deterministic && mt_cuda_messages_pending()) made = choice_for_other_tokens(p, shape, stream);
    *is_new = !made;
    if (made) return made;
    made = choice_add(&shape, stream);
    made->unfused = !(stream->deterministic ? choose_by_shape(&shape, made, o, stream) : choose(p, made, o, stream));
    if (!stream->deterministic || fits(p, made, stream)) return made;
    made = choice_add(&p->shape, stream);
    made->unfused = !choose(p, made, o, stream);
    return made;
}

/* Removes the last plan of a full list. */
static void make_room(plan **list) {
    for (int length = 0; *list; list = &(*list)->next)
        if (++length == PLANS_IN_LIST) {
            destroy(*list);
            *list = NULL;
            return;
        }
}

/* The plan of a shape, created if it is new; its operand pointers are set. *is_new: its choice was made now. */
static plan *plan_for(const product *wanted, const operands *o, bool *is_new, mt_stream *stream) {
    product shape = *wanted;
    shape.alignment = shared_alignment(o);
    plan **list = list_of(&shape), *p = *list;
    while (p && !(p->deterministic == stream->deterministic && same_shape(&p->shape, &shape))) p = p->next;
    *is_new = false;
    if (!p) {
        make_room(list);
        p = (plan *)mt_calloc(sizeof *p);
        p->shape = shape, p->deterministic = stream->deterministic, p->next = *list;
        *list = p;
        describe(p);
    }
    set_pointers(p, o);
    if (!p->chosen) p->chosen = choice_for(p, o, is_new, stream);
    return p;
}

static void run(const product *shape, void *d, const void *a, const void *b, const void *bias, mt_stream *stream,
                float scale = 0) {
    bool is_new;
    operands o = {d, a, b, bias, NULL, NULL, NULL, scale};
    plan *p = plan_for(shape, &o, &is_new, stream);
    multiply(p, d, &o, &p->chosen->algorithm, stream);
}

/* Runs a product with a GELU epilogue, or `unfused`, which enqueues the equivalent separate kernels. If measurements
 * are allowed, the faster one runs. */
template <class Unfused>
static void run_gelu(const product *shape, const operands *o, Unfused unfused, mt_stream *stream) {
    bool is_new;
    plan *p = plan_for(shape, o, &is_new, stream);
    if (is_new && !p->chosen->unfused && is_timed(shape, stream)) {
        choice *made = p->chosen;
        auto enqueue = [&](int i) { // 0: fused, 1: separate kernels
            if (i == 1) return unfused();
            p = plan_for(shape, o, &is_new, stream); // `unfused` may have removed it
            multiply(p, o->d, o, &made->algorithm, stream);
        };
        enqueue(1);
        made->unfused = mt_fastest(2, enqueue, false, stream) == 1;
        p = plan_for(shape, o, &is_new, stream);
    }
    if (p->chosen->unfused)
        unfused();
    else
        multiply(p, o->d, o, &p->chosen->algorithm, stream);
}

/* ---- linear layers ----------------------------------------------------------------------------------------------- */

extern "C" void mt_cuda_linear_forward(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    if (mt_cuda_gemv_hopper(a, dtype, stream) || mt_cuda_gemv(a, dtype, stream)) return;
    cublasLtEpilogue_t epilogue = a->bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    product shape = {true, false, false, epilogue, a->N, a->T, a->K, dtype, dtype, dtype};
    run(&shape, a->y, a->w, a->x, a->bias, stream);
}

extern "C" void mt_cuda_linear_backward_input(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    product shape = {false, false, false, CUBLASLT_EPILOGUE_DEFAULT, a->K, a->T, a->N, dtype, dtype, dtype};
    run(&shape, a->dx, a->w, a->dy, NULL, stream);
}

/* GELU and its gradient as epilogues. Per element of [T, N] in bf16, the fused forward reads 2 bytes less than a
 * separate kernel; the fused backward saves 4 bytes of reads and writes. The result is also rounded once less. cuBLASLt
 * implements only the tanh approximation. It has no epilogue for fp32, and its kernels are slow for rows that are not a
 * multiple of 16 bytes; these cases use separate kernels. */
static bool gelu_in_epilogue(int64_t N, int64_t K, mt_dtype dtype) {
    return dtype != MT_F32 && N % 8 == 0 && K % 8 == 0;
}

extern "C" void mt_cuda_linear_gelu_forward(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    auto unfused = [&] {
        mt_linear_args linear = *a;
        linear.y = a->pre;
        mt_cuda_linear_forward(&linear, dtype, stream);
        mt_activation_args gelu = {a->T, a->N, MT_ACTIVATION_GELU_TANH, a->pre, NULL, a->y, NULL, NULL, NULL, {}, {}};
        mt_cuda_activation_forward(&gelu, dtype, stream);
    };
    if (a->T <= mt_gemv_rows(a->N, a->K, dtype) || !gelu_in_epilogue(a->N, a->K, dtype)) return unfused();
    cublasLtEpilogue_t epilogue = a->bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    product shape = {true, false, false, epilogue, a->N, a->T, a->K, dtype, dtype, dtype};
    operands o = {a->y, a->w, a->x, a->bias, a->pre, NULL, NULL, 0};
    run_gelu(&shape, &o, unfused, stream);
}

extern "C" void mt_cuda_linear_backward_gelu(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    auto unfused = [&] {
        mt_cuda_linear_backward_input(a, dtype, stream);
        mt_activation_args gelu = {a->T, a->K, MT_ACTIVATION_GELU_TANH, a->x, NULL, NULL, a->dx, a->dx, NULL, {}, {}};
        mt_cuda_activation_backward(&gelu, dtype, stream);
    };
    if (!gelu_in_epilogue(a->N, a->K, dtype)) return unfused();
    product shape = {false, false, false, CUBLASLT_EPILOGUE_DGELU, a->K, a->T, a->N, dtype, dtype, dtype};
    operands o = {a->dx, a->w, a->dy, NULL, (void *)a->x, NULL, NULL, 0};
    run_gelu(&shape, &o, unfused, stream);
}

template <class E> __global__ void add_bias(float *out, const E *bias, int64_t M, int64_t N) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < M * N) out[i] += mt_to_float(bias[i % N]);
}

/* Products of two bf16 or fp16 are exact in fp32, so routing is fp32 for all types of x. */
extern "C" void mt_cuda_router_logits(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    if (a->T == 0) return;
    product shape = {true, false, false, CUBLASLT_EPILOGUE_DEFAULT, a->N, a->T, a->K, dtype, dtype, MT_F32};
    run(&shape, a->y, a->w, a->x, NULL, stream);
    if (!a->bias) return;
    const unsigned blocks = (unsigned)mt_divide_up(a->T * a->N, 256);
    float *logits = (float *)a->y;
    mt_by_type(dtype, [&](auto type) {
        add_bias<<<blocks, 256, 0, stream->stream>>>(logits, (const decltype(type) *)a->bias, a->T, a->N);
        MT_CUDA_LAUNCHED();
    });
}

/* A block sums 32 columns over a chunk of the tokens, 8 tokens at a time; partial is [chunks, N]. Reads T N elements,
 * writes chunks N floats. */
enum { BIAS_COLUMNS = 32, BIAS_ROWS = 8, BIAS_CHUNKS = 64 };

template <class E> __global__ void bias_partial_sums(float *partial, const E *dy, int64_t T, int64_t N) {
    __shared__ float sums[BIAS_ROWS][BIAS_COLUMNS + 1];
    int64_t column = (int64_t)blockIdx.x * BIAS_COLUMNS + threadIdx.x, chunk = (T + gridDim.y - 1) / gridDim.y;
    int64_t end = min(T, (blockIdx.y + 1) * chunk);
    float sum = 0;
    if (column < N)
        for (int64_t t = blockIdx.y * chunk + threadIdx.y; t < end; t += BIAS_ROWS)
            sum += mt_to_float(dy[t * N + column]);
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= N) return;
    for (int row = 1; row < BIAS_ROWS; row++) sum += sums[row][threadIdx.x];
    partial[blockIdx.y * N + column] = sum;
}

/* Adds the chunks in order, so that the sum is reproducible bit for bit. */
__global__ void bias_add_sums(float *dbias, const float *partial, int64_t chunks, int64_t N) {
    int64_t column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= N) return;
    float sum = 0;
    for (int64_t i = 0; i < chunks; i++) sum += partial[i * N + column];
    dbias[column] += sum;
}

extern "C" void mt_cuda_column_sums(float *dbias, const void *dy, int64_t T, int64_t N, mt_dtype dtype,
                                    mt_stream *stream) {
    if (T == 0) return;
    int64_t chunks = mt_divide_up(T, 64);
    if (chunks > BIAS_CHUNKS) chunks = BIAS_CHUNKS;
    float *partial = (float *)mt_cuda_workspace(stream, chunks * N * (int64_t)sizeof(float));
    dim3 grid((unsigned)mt_divide_up(N, BIAS_COLUMNS), (unsigned)chunks), block(BIAS_COLUMNS, BIAS_ROWS);
    mt_by_type(dtype, [&](auto type) {
        bias_partial_sums<<<grid, block, 0, stream->stream>>>(partial, (const decltype(type) *)dy, T, N);
        MT_CUDA_LAUNCHED();
    });
    bias_add_sums<<<(unsigned)mt_divide_up(N, 256), 256, 0, stream->stream>>>(dbias, partial, chunks, N);
    MT_CUDA_LAUNCHED();
}

extern "C" void mt_cuda_linear_backward_weight(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    product shape = {false, true, a->accumulate, CUBLASLT_EPILOGUE_DEFAULT, a->K, a->N, a->T, dtype, dtype, MT_F32};
    run(&shape, a->dw, a->x, a->dy, NULL, stream);
    if (a->dbias) mt_cuda_column_sums(a->dbias, a->dy, a->T, a->N, dtype, stream);
}

/* The three products with strides, for one weight. */
extern "C" void mt_cuda_strided_forward(const mt_grouped_args *a, mt_dtype dtype, mt_stream *stream) {
    product shape = {true, false, a->accumulate, CUBLASLT_EPILOGUE_DEFAULT, a->N, a->M, a->K, dtype, dtype, dtype};
    shape.b_stride = a->x_stride, shape.d_stride = a->y_stride;
    if (a->M > 0) run(&shape, a->y, a->w, a->x, NULL, stream, a->scale);
}

extern "C" void mt_cuda_strided_backward_input(const mt_grouped_args *a, mt_dtype dtype, mt_stream *stream) {
    product shape = {false, false, a->accumulate, CUBLASLT_EPILOGUE_DEFAULT, a->K, a->M, a->N, dtype, dtype, dtype};
    shape.b_stride = a->y_stride, shape.d_stride = a->x_stride;
    if (a->M > 0) run(&shape, a->dx, a->w, a->dy, NULL, stream, a->scale);
}

extern "C" void mt_cuda_strided_backward_weight(const mt_grouped_args *a, mt_dtype dtype, mt_stream *stream) {
    product shape = {false, true, a->accumulate, CUBLASLT_EPILOGUE_DEFAULT, a->K, a->N, a->M, dtype, dtype, MT_F32};
    shape.a_stride = a->x_stride, shape.b_stride = a->y_stride;
    run(&shape, a->dw, a->x, a->dy, NULL, stream);
}

/* out^T [N, M] = op(b)^T op(a)^T: the first operand is b. */
extern "C" void mt_cuda_batched_product(const mt_product_args *a, mt_dtype dtype, mt_stream *stream) {
    product shape = {a->b_transposed, a->a_transposed, false, CUBLASLT_EPILOGUE_DEFAULT, a->N, a->M, a->K,
                     dtype,           dtype,           dtype};
    shape.count = a->count, shape.tf32 = a->tf32 && dtype == MT_F32 && mt_cuda_device()->major >= 8;
    operands o = {a->out, a->b, a->a, NULL, NULL, NULL, NULL, a->scale, a->add, a->add ? a->add_scale : 0};
    bool is_new;
    plan *p = plan_for(&shape, &o, &is_new, stream);
    multiply(p, a->out, &o, &p->chosen->algorithm, stream);
}

/* ---- fp8 products ----------------------------------------------------------------------------------------------- */

/* True if cuBLASLt takes the product; `inner`: the number of summed elements. Its rows are multiples of 16 bytes, and
 * operands and scales begin at such. With scales per vector, activations have a multiple of 8 rows (also in Transformer
 * Engine), and the distance between rows of scales must follow from `inner`. It has no product of two operands in e5m2,
 * or of two with scales per 128 x 128.
 */
static bool serves(const mt_fp8_product_args *p, int64_t inner) {
    const uintptr_t scales = (uintptr_t)p->a.inverse_scales | (uintptr_t)p->b.inverse_scales;
    const uintptr_t addresses =
        (uintptr_t)p->a.data | (uintptr_t)p->b.data | (uintptr_t)p->out | (uintptr_t)p->bias | scales;
    if (p->offsets || inner == 0 || p->N % MT_CUDA_FP8_MULTIPLE != 0 || addresses % 16 != 0) return false;
    if (p->a.format == MT_F8_E5M2 && p->b.format == MT_F8_E5M2) return false;
    if (p->a.blocks == MT_FP8_TENSOR && p->b.blocks == MT_FP8_TENSOR) return true;
    for (const mt_fp8_matrix &matrix : {p->a, p->b})
        if (matrix.blocks == MT_FP8_BLOCK_128 && mt_divide_up(inner, 512) != mt_divide_up(matrix.stride, 512))
            return false;
    return CUBLAS_VERSION >= 120900 && p->M % 8 == 0 && p->a.blocks != MT_FP8_TENSOR && p->b.blocks != MT_FP8_TENSOR &&
           (p->a.blocks == MT_FP8_VECTOR_128 || p->b.blocks == MT_FP8_VECTOR_128);
}

/* out^T [N, M] = b a^T. Sums include the zeros that follow K elements. cuBLASLt adds a bias in bf16 only. */
extern "C" bool mt_fp8_cublaslt(const mt_fp8_product_args *p, mt_stream *stream) {
    const int64_t multiple = p->a.blocks == MT_FP8_TENSOR ? 16 : 128, inner = mt_divide_up(p->K, multiple) * multiple;
    const bool fuses_bias = p->bias && p->out_dtype == MT_BF16;
    if (!serves(p, inner)) return false;
    product shape = {true, false, p->accumulate, fuses_bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT};
    shape.rows = p->N, shape.cols = p->M, shape.inner = inner;
    shape.a_dtype = p->b.format, shape.b_dtype = p->a.format, shape.out_dtype = p->out_dtype;
    shape.a_stride = p->b.stride, shape.b_stride = p->a.stride;
    shape.a_blocks = p->b.blocks, shape.b_blocks = p->a.blocks;
    shape.fast_sums = p->a.blocks == MT_FP8_TENSOR && !p->exact_sums;
    operands o = {p->out, p->b.data,           p->a.data,           fuses_bias ? p->bias : NULL,
                  NULL,   p->b.inverse_scales, p->a.inverse_scales, 0};
    bool is_new;
    plan *found = plan_for(&shape, &o, &is_new, stream);
    if (found->chosen->unfused) return false;
    multiply(found, p->out, &o, &found->chosen->algorithm, stream);
    if (!p->bias || fuses_bias) return true;
    add_bias<<<(unsigned)mt_divide_up(p->M * p->N, 256), 256, 0, stream->stream>>>((float *)p->out,
                                                                                   (const float *)p->bias, p->M, p->N);
    MT_CUDA_LAUNCHED();
    return true;
}
