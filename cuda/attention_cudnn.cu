/* attention_cudnn.cu: attention by cuDNN, outside of the ladder.
 *
 * cuDNN gets the computation as a graph of small operations on tensors, most of them virtual (not in memory). It
 * recognises the pattern and runs one fused kernel. The graphs below are the ones that NVIDIA's cudnn-frontend builds
 * for scaled dot-product attention, written with the C interface. Each shape gets one plan, which is kept.
 *
 * A call is served if its spans form a batch: of one length, one distance and one kind. cuDNN stores its log-sum-exp as
 * [B, H, S]; a small kernel transposes it to our [T, H] and back. Its backward sums the gradient of q in fp32, in
 * whatever order its blocks finish, so two runs differ in the last bits. */
#include "attention.cuh"
#include "measure.cuh"

#include <math.h>
#include <string.h>

#ifdef MT_HAVE_CUDNN
#include <cudnn.h>

static_assert(CUDNN_VERSION >= 91000, "cuDNN 9.10 is the oldest whose attention takes these graphs");

typedef cudnnBackendDescriptor_t descriptor;

/* ---- spans as a batch -------------------------------------------------------------------------------------------- */

/* Sequence b holds query rows first_q + b step_q ..., key rows first_k + b step_k .... */
struct batch {
    int64_t B, Sq, Sk, first_q, first_k, step_q, step_k;
    bool causal;
};

static bool batch_of(const mt_spans *spans, batch *b) {
    const mt_span *s = spans->host;
    *b = {spans->count, s->q_len, s->k_len, s->q_start, s->k_start, s->q_len, s->k_len, s->causal};
    if (b->B > 1) b->step_q = s[1].q_start - s->q_start, b->step_k = s[1].k_start - s->k_start;
    if (b->step_q < b->Sq || b->step_k < b->Sk) return false; // two spans would write the same keys
    for (int64_t i = 1; i < b->B; i++)
        if (s[i].q_len != b->Sq || s[i].k_len != b->Sk || s[i].causal != b->causal ||
            s[i].q_start != s->q_start + i * b->step_q || s[i].k_start != s->k_start + i * b->step_k)
            return false;
    return true;
}

/* Only whole tiles are served (the backward of other lengths needs padding masks), and only causal masks from the first
 * key on. Latent attention's heads, which share no keys, need Hopper or later: on older GPUs no engine supports them.
 * Only Hopper has engines for both directions of heads wider than 128. */
static bool cudnn_serves(const mt_attention *a, mt_dtype dtype, mt_stream *stream, batch *b) {
    bool latent = a->head_size == MT_CUDNN_LATENT_CHANNELS && a->value_size == MT_CUDNN_CHANNELS;
    int64_t widest = mt_cuda_device()->major == 9 ? MT_CUDNN_HOPPER_CHANNELS : MT_CUDNN_CHANNELS;
    bool sizes = a->head_size == a->value_size ? a->head_size <= widest : latent && a->num_heads == a->num_groups;
    return stream && flash_serves(a, dtype) && sizes && a->dropout.p <= 0 && !a->pages.table && a->window == 0 &&
           batch_of(&a->spans, b) && b->Sq > 0 && b->Sk > 0 && b->Sq % MT_CUDNN_TOKENS == 0 &&
           b->Sk % MT_CUDNN_TOKENS == 0 && (!b->causal || b->Sq == b->Sk);
}

/* ---- graphs ------------------------------------------------------------------------------------------------------ */

/* Ids of the real tensors, which connect a plan with its pointers. Virtual tensors are numbered from FIRST_VIRTUAL
 * on. */
enum { NO_TENSOR, Q, K, V, OUT, STATS, DOUT, ROW_DOT, DQ, DK, DV, DQ_SUM, SCALE, ONE, LOWEST, FIRST_VIRTUAL };
enum { MAX_DESCRIPTORS = 160, MAX_OPERATIONS = 40, MAX_CONFIGS = 8 };

struct graph {
    batch b;
    cudnnDataType_t type; // of the operands: bf16 or fp16
    mt_attention shape;
    cudnnStatus_t status; // of the first call that failed; later calls are skipped
    int num_descriptors, num_operations;
    int64_t num_tensors;
    descriptor descriptors[MAX_DESCRIPTORS], operations[MAX_OPERATIONS];
};

static void note(graph *g, cudnnStatus_t status) {
    if (g->status == CUDNN_STATUS_SUCCESS) g->status = status;
}

static descriptor create(graph *g, cudnnBackendDescriptorType_t type) {
    descriptor d = NULL;
    MT_CHECK(g->num_descriptors < MAX_DESCRIPTORS);
    note(g, cudnnBackendCreateDescriptor(type, &d));
    g->descriptors[g->num_descriptors++] = d;
    return d;
}

static void set(graph *g, descriptor d, cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                int64_t count, const void *values) {
    if (g->status == CUDNN_STATUS_SUCCESS) note(g, cudnnBackendSetAttribute(d, name, type, count, values));
}

static void set_descriptor(graph *g, descriptor d, cudnnBackendAttributeName_t name, descriptor value) {
    if (value) set(g, d, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

static void set_type(graph *g, descriptor d, cudnnBackendAttributeName_t name, cudnnDataType_t type) {
    set(g, d, name, CUDNN_TYPE_DATA_TYPE, 1, &type);
}

static descriptor finish(graph *g, descriptor d) {
    if (g->status == CUDNN_STATUS_SUCCESS) note(g, cudnnBackendFinalize(d));
    return d;
}

static void graph_free(graph *g) {
    for (int i = g->num_descriptors - 1; i >= 0; i--)
        if (g->descriptors[i]) cudnnBackendDestroyDescriptor(g->descriptors[i]);
    g->num_descriptors = 0;
}

/* A tensor of four dimensions; uid NO_TENSOR for a virtual one. */
static descriptor tensor(graph *g, int64_t uid, cudnnDataType_t type, const int64_t sizes[4],
                         const int64_t strides[4]) {
    descriptor d = create(g, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    int64_t alignment = 16, number = uid == NO_TENSOR ? FIRST_VIRTUAL + g->num_tensors++ : uid;
    bool is_virtual = uid == NO_TENSOR, by_value = uid == SCALE || uid == ONE || uid == LOWEST;
    set_type(g, d, CUDNN_ATTR_TENSOR_DATA_TYPE, type);
    set(g, d, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, sizes);
    set(g, d, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, strides);
    set(g, d, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &number);
    set(g, d, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    set(g, d, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &is_virtual);
    set(g, d, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &by_value);
    return finish(g, d);
}

/* [B, heads, rows, columns], packed. */
static descriptor packed(graph *g, int64_t uid, cudnnDataType_t type, int64_t heads, int64_t rows, int64_t columns) {
    const int64_t sizes[] = {g->b.B, heads, rows, columns};
    const int64_t strides[] = {heads * rows * columns, rows * columns, columns, 1};
    return tensor(g, uid, type, sizes, strides);
}

/* A scalar, passed with the pointers. */
static descriptor number(graph *g, int64_t uid) {
    const int64_t ones[] = {1, 1, 1, 1};
    return tensor(g, uid, CUDNN_DATA_FLOAT, ones, ones);
}

/* Scores [B, H, Sq, Sk], and one number per query [B, H, Sq, 1]. */
static descriptor scores(graph *g, cudnnDataType_t type) {
    return packed(g, NO_TENSOR, type, g->shape.num_heads, g->b.Sq, g->b.Sk);
}
static descriptor rows(graph *g, int64_t uid) {
    return packed(g, uid, CUDNN_DATA_FLOAT, g->shape.num_heads, g->b.Sq, 1);
}

/* q, out and their gradients: [B, H, Sq, D or Dv] at `stride` between tokens. */
static descriptor queries(graph *g, int64_t uid, int64_t D, int64_t stride) {
    const int64_t sizes[] = {g->b.B, g->shape.num_heads, g->b.Sq, D};
    const int64_t strides[] = {g->b.step_q * stride, D, stride, 1};
    return tensor(g, uid, g->type, sizes, strides);
}

/* k, v and their gradients: [B, G, Sk, D or Dv], or transposed, [B, G, D, Sk]. */
static descriptor keys(graph *g, int64_t uid, cudnnDataType_t type, int64_t D, int64_t stride, bool transposed) {
    const int64_t Sk = g->b.Sk, G = g->shape.num_groups, step = g->b.step_k * stride;
    const int64_t sizes[] = {g->b.B, G, transposed ? D : Sk, transposed ? Sk : D};
    const int64_t strides[] = {step, D, transposed ? 1 : stride, transposed ? stride : 1};
    return tensor(g, uid, type, sizes, strides);
}

/* ---- operations -------------------------------------------------------------------------------------------------- */

static void operation(graph *g, descriptor d) {
    MT_CHECK(g->num_operations < MAX_OPERATIONS);
    g->operations[g->num_operations++] = finish(g, d);
}

/* y = mode(x, b, t); b and t may be NULL. */
static descriptor pointwise(graph *g, cudnnPointwiseMode_t mode, descriptor x, descriptor b, descriptor t, descriptor y,
                            cudnnDataType_t compute = CUDNN_DATA_FLOAT, int64_t axis = -1) {
    descriptor how = create(g, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    set(g, how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    set_type(g, how, CUDNN_ATTR_POINTWISE_MATH_PREC, compute);
    if (axis >= 0) set(g, how, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    finish(g, how);
    descriptor d = create(g, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    set_descriptor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
    set_descriptor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    set_descriptor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    set_descriptor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    set_descriptor(g, d, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    operation(g, d);
    return y;
}

/* c = a b for matrices of the last two dimensions; several heads of a may share a head of b. */
static descriptor matmul(graph *g, descriptor a, descriptor b, descriptor c) {
    descriptor how = create(g, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    set_type(g, how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_FLOAT);
    finish(g, how);
    descriptor d = create(g, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    set_descriptor(g, d, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    set_descriptor(g, d, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    set_descriptor(g, d, CUDNN_ATTR_OPERATION_MATMUL_CDESC, c);
    set_descriptor(g, d, CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
    operation(g, d);
    return c;
}

/* Reduces over the dimensions of x that y lacks. */
static descriptor reduce(graph *g, cudnnReduceTensorOp_t op, descriptor x, descriptor y) {
    descriptor how = create(g, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    set(g, how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &op);
    set_type(g, how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_FLOAT);
    finish(g, how);
    descriptor d = create(g, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    set_descriptor(g, d, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    set_descriptor(g, d, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    set_descriptor(g, d, CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
    operation(g, d);
    return y;
}

static descriptor reshape(graph *g, descriptor x, descriptor y) {
    descriptor d = create(g, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    set_descriptor(g, d, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    set_descriptor(g, d, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    operation(g, d);
    return y;
}

/* Sets the scores of keys after the query to the lowest number (causal mask). */
static descriptor mask(graph *g, descriptor s) {
    if (!g->b.causal) return s;
    descriptor row =
        pointwise(g, CUDNN_POINTWISE_GEN_INDEX, s, NULL, NULL, scores(g, CUDNN_DATA_INT32), CUDNN_DATA_FLOAT, 2);
    descriptor column =
        pointwise(g, CUDNN_POINTWISE_GEN_INDEX, s, NULL, NULL, scores(g, CUDNN_DATA_INT32), CUDNN_DATA_FLOAT, 3);
    descriptor seen =
        pointwise(g, CUDNN_POINTWISE_CMP_GE, row, column, NULL, scores(g, CUDNN_DATA_BOOLEAN), CUDNN_DATA_BOOLEAN);
    return pointwise(g, CUDNN_POINTWISE_BINARY_SELECT, s, number(g, LOWEST), seen, scores(g, CUDNN_DATA_FLOAT));
}

/* ---- forward and backward ---------------------------------------------------------------------------------------- */

static void describe_forward(graph *g) {
    const mt_attention *s = &g->shape;
    const int64_t D = s->head_size, Dv = s->value_size;
    const cudnnDataType_t f32 = CUDNN_DATA_FLOAT;
    descriptor p = matmul(g, queries(g, Q, D, s->q_stride), keys(g, K, g->type, D, s->k_stride, true), scores(g, f32));
    p = mask(g, pointwise(g, CUDNN_POINTWISE_MUL, p, number(g, SCALE), NULL, scores(g, f32)));
    descriptor max = reduce(g, CUDNN_REDUCE_TENSOR_MAX, p, rows(g, NO_TENSOR));
    p = pointwise(g, CUDNN_POINTWISE_SUB, p, max, NULL, scores(g, f32));
    p = pointwise(g, CUDNN_POINTWISE_EXP, p, NULL, NULL, scores(g, f32));
    descriptor sum = reduce(g, CUDNN_REDUCE_TENSOR_ADD, p, rows(g, NO_TENSOR));
    descriptor log_sum = pointwise(g, CUDNN_POINTWISE_LOG, sum, NULL, NULL, rows(g, NO_TENSOR));
    pointwise(g, CUDNN_POINTWISE_ADD, max, log_sum, NULL, rows(g, STATS));
    p = pointwise(g, CUDNN_POINTWISE_DIV, p, sum, NULL, scores(g, g->type));
    matmul(g, p, keys(g, V, g->type, Dv, s->v_stride, false), queries(g, OUT, Dv, s->out_stride));
}

/* A transposed view of [B, H, Sq, Sk] as an operand. */
static descriptor transposed(graph *g, descriptor x) {
    const int64_t H = g->shape.num_heads, Sq = g->b.Sq, Sk = g->b.Sk;
    const int64_t sizes[] = {g->b.B, H, Sk, Sq}, strides[] = {H * Sq * Sk, Sq * Sk, 1, Sk};
    return reshape(g, x, tensor(g, NO_TENSOR, g->type, sizes, strides));
}

/* gradient = a b summed over the heads that share keys. */
static void key_gradient(graph *g, descriptor a, descriptor b, int64_t uid, int64_t D, int64_t stride) {
    const mt_attention *s = &g->shape;
    descriptor gradient = keys(g, uid, g->type, D, stride, false);
    if (s->num_heads == s->num_groups) {
        matmul(g, a, b, gradient);
        return;
    }
    descriptor of_heads = packed(g, NO_TENSOR, g->type, s->num_heads, g->b.Sk, D);
    reduce(g, CUDNN_REDUCE_TENSOR_ADD, matmul(g, a, b, of_heads), gradient);
}

static void describe_backward(graph *g) {
    const mt_attention *s = &g->shape;
    const int64_t H = s->num_heads, D = s->head_size, Dv = s->value_size;
    const cudnnDataType_t f32 = CUDNN_DATA_FLOAT;
    descriptor q = queries(g, Q, D, s->q_stride), dout = queries(g, DOUT, Dv, s->out_stride), scale = number(g, SCALE);
    descriptor kt = keys(g, K, g->type, D, s->k_stride, true), vt = keys(g, V, g->type, Dv, s->v_stride, true);
    // row_dot = sum(dout out)
    descriptor x = packed(g, NO_TENSOR, f32, H, g->b.Sq, Dv);
    x = pointwise(g, CUDNN_POINTWISE_MUL, dout, queries(g, OUT, Dv, s->out_stride), NULL, x);
    x = reduce(g, CUDNN_REDUCE_TENSOR_ADD, x, rows(g, NO_TENSOR));
    descriptor row_dot = pointwise(g, CUDNN_POINTWISE_MUL, x, number(g, ONE), NULL, rows(g, ROW_DOT));
    // p = exp(scale q k^T - lse), dv = p^T dout
    descriptor p = matmul(g, q, kt, scores(g, f32));
    p = pointwise(g, CUDNN_POINTWISE_MUL, p, scale, NULL, scores(g, f32));
    p = mask(g, pointwise(g, CUDNN_POINTWISE_SUB, p, rows(g, STATS), NULL, scores(g, f32)));
    p = pointwise(g, CUDNN_POINTWISE_EXP, p, NULL, NULL, scores(g, f32));
    key_gradient(g, transposed(g, p), dout, DV, Dv, s->v_stride);
    // ds = scale p (dout v^T - row_dot), dk = ds^T q
    descriptor ds = matmul(g, dout, vt, scores(g, f32));
    ds = pointwise(g, CUDNN_POINTWISE_SUB, ds, row_dot, NULL, scores(g, f32));
    ds = pointwise(g, CUDNN_POINTWISE_MUL, ds, p, NULL, scores(g, f32));
    ds = pointwise(g, CUDNN_POINTWISE_MUL, ds, scale, NULL, scores(g, f32));
    key_gradient(g, transposed(g, ds), q, DK, D, s->k_stride);
    // // dq = ds k, accumulated in fp32
    descriptor k = reshape(g, kt, keys(g, NO_TENSOR, f32, D, s->k_stride, false));
    descriptor sum = matmul(g, ds, k, packed(g, DQ_SUM, f32, H, g->b.Sq, D));
    pointwise(g, CUDNN_POINTWISE_IDENTITY, sum, NULL, NULL, queries(g, DQ, D, s->q_stride));
}

/* ---- plans ------------------------------------------------------------------------------------------------------- */

/* The key of a plan; compared as bytes, so zero it before filling. */
struct plan_key {
    int64_t B, H, G, Sq, Sk, D, Dv, step_q, step_k, q_stride, k_stride, v_stride, out_stride;
    int64_t causal, backward, dtype;
};

struct plan {
    plan_key key;
    graph g;              // the plan refers to it
    descriptor execution; // NULL: cuDNN has no engine for this key
    int64_t workspace_bytes;
    mt_attention_direction *fastest; // for `auto`; NULL: not measured yet
    plan *next;
};

/* Plans live as long as the process. */
static plan *plans;

/* Returns NULL if cuDNN cannot be initialised, for example because a library is missing. */
static cudnnHandle_t cudnn_handle(void) {
    static cudnnHandle_t handle;
    static bool tried;
    if (!tried && cudnnCreate(&handle) != CUDNN_STATUS_SUCCESS) handle = NULL;
    tried = true;
    return handle;
}

/* The first of the heuristic's engines whose plan fits in the workspace. */
static void choose_engine(plan *p, int64_t workspace_bytes) {
    graph *g = &p->g;
    cudnnHandle_t handle = cudnn_handle();
    const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_A;
    descriptor configs[MAX_CONFIGS], whole = create(g, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    set(g, whole, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
    set(g, whole, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, g->num_operations, g->operations);
    finish(g, whole);
    descriptor heuristic = create(g, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    set_descriptor(g, heuristic, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, whole);
    set(g, heuristic, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    finish(g, heuristic);
    for (int i = 0; i < MAX_CONFIGS; i++) configs[i] = create(g, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    int64_t count = 0, one = 1;
    if (g->status == CUDNN_STATUS_SUCCESS)
        note(g, cudnnBackendGetAttribute(heuristic, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                         MAX_CONFIGS, &count, configs));
    for (int i = 0; g->status == CUDNN_STATUS_SUCCESS && i < count && i < MAX_CONFIGS && !p->execution; i++) {
        descriptor execution = create(g, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
        set(g, execution, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle);
        set_descriptor(g, execution, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configs[i]);
        if (g->status != CUDNN_STATUS_SUCCESS || cudnnBackendFinalize(execution) != CUDNN_STATUS_SUCCESS) continue;
        note(g, cudnnBackendGetAttribute(execution, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &one,
                                         &p->workspace_bytes));
        if (p->workspace_bytes <= workspace_bytes) p->execution = execution;
    }
}

/* Sizes of our own buffers in the workspace, before cuDNN's: the log-sum-exp in cuDNN's layout, and the backward's sum
 * of dq. */
static int64_t stats_bytes(const plan_key *key) {
    return mt_divide_up(key->B * key->H * key->Sq * (int64_t)sizeof(float), 256) * 256;
}
static int64_t dq_sum_bytes(const plan_key *key) {
    return key->backward ? key->B * key->H * key->Sq * key->D * (int64_t)sizeof(float) : 0;
}

static plan *plan_of(const mt_attention *a, mt_dtype dtype, mt_stream *stream, const batch *b, bool backward) {
    plan_key key;
    memset(&key, 0, sizeof key);
    key = {b->B,      a->num_heads, a->num_groups, b->Sq,       b->Sk,         a->head_size, a->value_size, b->step_q,
           b->step_k, a->q_stride,  a->k_stride,   a->v_stride, a->out_stride, b->causal,    backward,      dtype};
    for (plan *p = plans; p; p = p->next)
        if (memcmp(&p->key, &key, sizeof key) == 0) return p;
    plan *p = (plan *)mt_calloc(sizeof *p);
    p->key = key, p->g.b = *b, p->g.shape = *a;
    p->g.type = dtype == MT_F16 ? CUDNN_DATA_HALF : CUDNN_DATA_BFLOAT16;
    p->next = plans, plans = p;
    if (!cudnn_handle()) return p;
    if (backward)
        describe_backward(&p->g);
    else
        describe_forward(&p->g);
    choose_engine(p, stream->workspace_bytes - stats_bytes(&key) - dq_sum_bytes(&key));
    if (!p->execution) graph_free(&p->g);
    return p;
}

/* ---- execution --------------------------------------------------------------------------------------------------- */

static void check(cudnnStatus_t status) {
    char reason[256] = "";
    if (status == CUDNN_STATUS_SUCCESS) return;
    cudnnGetLastErrorString(reason, sizeof reason);
    mt_die("cuDNN: attention: %s: %s", cudnnGetErrorString(status), reason);
}

/* lse[T, H] from cuDNN's stats[B, H, S], or the reverse; a block transposes 32 x 32 of them. */
enum { SIDE = 32, SIDE_ROWS = 8 };
template <bool TO_LSE>
__global__ void transpose_stats(float *lse, float *stats, int64_t H, int64_t S, int64_t first, int64_t step) {
    __shared__ float block[SIDE][SIDE + 1];
    int64_t s0 = (int64_t)blockIdx.x * SIDE, h0 = (int64_t)blockIdx.y * SIDE, b = blockIdx.z;
    lse += (first + b * step + s0) * H + h0, stats += (b * H + h0) * S + s0;
    int64_t heads = min((int64_t)SIDE, H - h0), queries = min((int64_t)SIDE, S - s0), x = threadIdx.x;
    for (int64_t y = threadIdx.y; y < SIDE; y += SIDE_ROWS) {
        if (TO_LSE && y < heads && x < queries) block[y][x] = stats[y * S + x];
        if (!TO_LSE && y < queries && x < heads) block[x][y] = lse[y * H + x];
    }
    __syncthreads();
    for (int64_t y = threadIdx.y; y < SIDE; y += SIDE_ROWS) {
        if (TO_LSE && y < queries && x < heads) lse[y * H + x] = block[x][y];
        if (!TO_LSE && y < heads && x < queries) stats[y * S + x] = block[y][x];
    }
}

template <bool TO_LSE> static void transpose(const mt_attention *a, const batch *b, float *stats, cudaStream_t stream) {
    int64_t H = a->num_heads;
    dim3 grid((unsigned)mt_divide_up(b->Sq, SIDE), (unsigned)mt_divide_up(H, SIDE), (unsigned)b->B);
    transpose_stats<TO_LSE><<<grid, dim3(SIDE, SIDE_ROWS), 0, stream>>>(a->lse, stats, H, b->Sq, b->first_q, b->step_q);
    MT_CUDA_LAUNCHED();
}

/* Pointers by tensor id; NULL for tensors that are not in this graph. */
static void execute(const plan *p, void *const data[FIRST_VIRTUAL], void *workspace, mt_stream *stream) {
    int64_t uids[FIRST_VIRTUAL], count = 0;
    void *pointers[FIRST_VIRTUAL];
    for (int64_t uid = NO_TENSOR + 1; uid < FIRST_VIRTUAL; uid++)
        if (data[uid]) uids[count] = uid, pointers[count++] = data[uid];
    descriptor pack;
    check(cudnnSetStream(cudnn_handle(), stream->stream));
    check(cudnnBackendCreateDescriptor(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, &pack));
    check(cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, uids));
    check(cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, pointers));
    check(cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace));
    check(cudnnBackendFinalize(pack));
    check(cudnnBackendExecute(cudnn_handle(), p->execution, pack));
    check(cudnnBackendDestroyDescriptor(pack));
}

/* Row `first` of an operand of 16-bit elements. */
static void *at(const void *operand, int64_t first, int64_t stride) {
    return (uint16_t *)operand + first * stride;
}

static void run(const plan *p, const mt_attention *a, mt_stream *stream, const batch *b) {
    const bool backward = p->key.backward;
    float scale = a->scale, one = 1, lowest = -INFINITY;
    int64_t own = stats_bytes(&p->key) + dq_sum_bytes(&p->key);
    char *workspace = (char *)mt_cuda_workspace(stream, own + p->workspace_bytes);
    float *stats = (float *)workspace;
    void *data[FIRST_VIRTUAL] = {};
    data[Q] = at(a->q, b->first_q, a->q_stride), data[OUT] = at(a->out, b->first_q, a->out_stride);
    data[K] = at(a->k, b->first_k, a->k_stride), data[V] = at(a->v, b->first_k, a->v_stride);
    data[STATS] = stats, data[SCALE] = &scale;
    if (b->causal) data[LOWEST] = &lowest;
    if (backward) {
        data[DOUT] = at(a->dout, b->first_q, a->out_stride), data[DQ] = at(a->dq, b->first_q, a->q_stride);
        data[DK] = at(a->dk, b->first_k, a->k_stride), data[DV] = at(a->dv, b->first_k, a->v_stride);
        data[ROW_DOT] = a->row_dot + b->first_q * a->num_heads, data[ONE] = &one;
        data[DQ_SUM] = workspace + stats_bytes(&p->key);
        transpose<false>(a, b, stats, stream->stream);
    }
    execute(p, data, workspace + own, stream);
    if (!backward) transpose<true>(a, b, stats, stream->stream);
}

static bool run_cudnn(const mt_attention *a, mt_dtype dtype, mt_stream *stream, bool backward) {
    batch b;
    if (!cudnn_serves(a, dtype, stream, &b)) return false;
    const plan *p = plan_of(a, dtype, stream, &b, backward);
    if (p->execution) {
        run(p, a, stream, &b);
    } else if (a->backend == MT_ATTENTION_CUDNN) {
        mt_die(
            "cuDNN %lld has no attention for %lld sequences of %lld tokens, heads %lld/%lld, %lld channels and %lld of "
            "values on this GPU; use --attention-backend flash",
            (long long)cudnnGetVersion(), (long long)b.B, (long long)b.Sq, (long long)p->key.H, (long long)p->key.G,
            (long long)p->key.D, (long long)p->key.Dv);
    }
    return p->execution != NULL;
}

/* ---- auto -------------------------------------------------------------------------------------------------------- */

/* Shorter sequences do not justify a plan. */
enum { MEASURED_LENGTH = 512 };

/* The fastest of `ours`, cuDNN and, for the backward, our kernel that sums in no fixed order. The first call of a shape
 * runs and times them on its operands; this is safe because outputs are written, not added to. A choice by timing may
 * differ from run to run, and the backwards of the other two do not repeat bit for bit, so deterministic runs take
 * `ours`. */
static mt_attention_direction *fastest(const mt_attention *a, mt_dtype dtype, mt_stream *stream, bool backward,
                                       mt_attention_direction *ours) {
    batch b;
    if (!stream || stream->deterministic || !cudnn_serves(a, dtype, stream, &b) || b.Sq < MEASURED_LENGTH) return ours;
    plan *p = plan_of(a, dtype, stream, &b, backward);
    if (p->fastest) return p->fastest;
    mt_attention_direction *const all[] = {ours, backward ? mt_attention_cudnn.backward : mt_attention_cudnn.forward,
                                           backward ? mt_attention_unordered.backward : NULL};
    mt_attention_direction *candidates[3];
    int count = 0;
    for (mt_attention_direction *direction : all) // a call also warms up; false: it does not serve this shape
        if (direction && direction(a, dtype, stream)) candidates[count++] = direction;
    auto enqueue = [&](int i) { candidates[i](a, dtype, stream); };
    p->fastest = count > 0 ? candidates[mt_fastest(count, enqueue, false, stream)] : ours;
    return p->fastest;
}

/* cuDNN's own part of the backward's workspace: gradients of k and v for every head, if heads share keys; those of
 * latent attention do not. */
int64_t mt_attention_cudnn_workspace_bytes(int64_t T, int64_t H, int64_t D) {
    const int64_t slack = 16 << 20, dq_sum = 4 * D, of_heads = 2 * 2 * D, stats = 4;
    return D <= MT_CUDNN_HOPPER_CHANNELS ? T * H * (dq_sum + of_heads + stats) + slack : 0;
}

#else

static bool run_cudnn(const mt_attention *a, mt_dtype dtype, mt_stream *stream, bool backward) {
    (void)a, (void)dtype, (void)stream, (void)backward;
    return false;
}

static mt_attention_direction *fastest(const mt_attention *a, mt_dtype dtype, mt_stream *stream, bool backward,
                                       mt_attention_direction *ours) {
    (void)a, (void)dtype, (void)stream, (void)backward;
    return ours;
}

int64_t mt_attention_cudnn_workspace_bytes(int64_t T, int64_t H, int64_t D) {
    (void)T, (void)H, (void)D;
    return 0;
}
#endif

static bool cudnn_forward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    return run_cudnn(a, dtype, stream, false);
}

static bool cudnn_backward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    return run_cudnn(a, dtype, stream, true);
}

extern "C" const mt_attention_rung mt_attention_cudnn = {"cudnn", cudnn_forward, cudnn_backward};

bool mt_attention_run(const mt_attention *a, mt_dtype dtype, mt_stream *stream, bool backward,
                      mt_attention_direction *ours) {
    if (a->backend == MT_ATTENTION_CUDNN && run_cudnn(a, dtype, stream, backward)) return true;
    if (a->backend == MT_ATTENTION_AUTO && fastest(a, dtype, stream, backward, ours)(a, dtype, stream)) return true;
    return ours(a, dtype, stream);
}
