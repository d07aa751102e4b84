/* decode_record.cu: recognises the layers of a dense model among the operations of a captured decode step.
 *
 * While a recording is open, the operations of a layer are collected rather than enqueued. If they come in the order of
 * a layer, each reads what the one before it wrote, and all layers have one shape, one kernel takes their place. If
 * not, the operations collected are enqueued as they are, and so is everything after them. The kernel does not write
 * the results that only the next operation reads, nor those for a backward. */
#include "decode.h"
#include "vector.cuh"

#include <functional>
#include <vector>

/* The operation that comes next. */
enum record_state { FIRST_NORM, QKV, QK, ATTENTION, OUT, MLP_NORM, FC1, ACTIVATION, FC2, LAST, CLOSED };

struct linear_operation {
    const void *y, *x, *w, *bias;
    int64_t T, N, K;
};

/* The operations of a layer. */
struct layer_operations {
    mt_norm_args norm; // before the layer: y and the weights
    const void *input; // of the norm
    linear_operation linears[MT_DECODE_PRODUCTS];
    mt_qk_args qk;
    mt_attention attention;
    mt_norm_args mlp_norm;
    mt_activation_args activation;
    mt_dropout_add_args end;
};

struct mt_decode_record {
    record_state state = FIRST_NORM;
    layer_operations now = {};
    std::vector<std::function<void()>> operations; // not enqueued yet
    std::vector<mt_decode_layer> layers;
    size_t whole_operations = 0, whole_layers = 0; // up to the last layer without a norm after it
    mt_decode_task task = {};
    char *memory = NULL; // of the device: the barrier's counter, then layers, then tensor maps
    std::vector<char> maps;
    bool launched = false; // the graph has the kernel
};

static bool fuses = true;
static int64_t num_fused, num_in_clusters;
static constexpr int64_t counter_bytes = 256, map_bytes = MT_DECODE_PRODUCTS * MT_DECODE_MAP_BYTES; // of a layer
static constexpr int64_t maps_begin = counter_bytes + MT_DECODE_LAYERS * (int64_t)sizeof(mt_decode_layer);
static_assert(maps_begin % MT_DECODE_MAP_BYTES == 0, "tensor maps are aligned");

extern "C" void mt_cuda_decode_fuse(bool on) {
    fuses = on;
}

extern "C" int64_t mt_decode_most_rows(int64_t C) {
    if (C <= 1024) return MT_DECODE_ROWS;
    return mt_gemv_hopper_serves(1, C, C) ? 0 : 2;
}

extern "C" int64_t mt_cuda_decode_fused(void) {
    return num_fused;
}
extern "C" int64_t mt_cuda_decode_in_clusters(void) {
    return num_in_clusters;
}

/* ---- layers ------------------------------------------------------------------------------------------------------ */

static bool is_wide(std::initializer_list<const void *> addresses, std::initializer_list<int64_t> lengths) {
    return mt_wide(MT_BF16, addresses, lengths);
}

static bool linear_fits(const linear_operation *l, const void *x, int64_t T, int64_t N, int64_t K) {
    return l->x == x && l->T == T && l->N == N && l->K == K && is_wide({l->w, l->x, l->y}, {N, K});
}

static bool norm_fits(const mt_norm_args *n, int64_t T, int64_t C) {
    return n->T == T && n->C == C && n->dropout.p <= 0 && n->w_offset == 0 && !n->means && !n->quantize.rows.data &&
           is_wide({n->y, n->w, n->b}, {C});
}

/* All fields of the operations that layer_fits compares one by one. With a field more this does not compile: layer_fits
 * must compare it too, or refuse what is not zero. (Attention: mt_decode_knows_attention.) */
static void name_all_fields(const mt_norm_args &norm, const mt_qk_args &qk, const mt_rotation &rotation,
                            const mt_activation_args &activation, const mt_dropout_add_args &end) {
    {
        [[maybe_unused]] const auto &[T, H, C, x, w, b, w_offset, eps, y, mean, rstd, dy, dresidual, dx, dw, db,
                                      x_stride, y_stride, dx_stride, dy_stride, means, sum, residual, token_index,
                                      dropout, quantize] = norm;
    }
    {
        [[maybe_unused]] const auto &[T, H, G, D, qkv, q_w, k_w, w_offset, q_rstd, k_rstd, eps, rotated, out, dqk, dqkv,
                                      dq_w, dk_w, qkv_stride, qk_stride, dqk_stride, dqkv_stride, k_cache, v_cache,
                                      cache_rows] = qk;
    }
    { [[maybe_unused]] const auto &[cos, sin, positions, R, interleaved] = rotation; }
    { [[maybe_unused]] const auto &[T, F, kind, x, weights, y, dy, dx, dweights, quantize, glu] = activation; }
    { [[maybe_unused]] const auto &[T, C, first_channel, token_index, x, residual, out, dropout] = end; }
}

/* Attention over the cache, to which the new keys and values were written: one query for each span. */
static bool attention_fits(const layer_operations *o, int64_t T) {
    const mt_attention *a = &o->attention;
    const linear_operation *qkv = &o->linears[MT_DECODE_QKV];
    int64_t H = a->num_heads, G = a->num_groups, D = a->head_size, width = (H + 2 * G) * D;
    const mt_qk_args *qk = &o->qk;
    const void *heads = qk->q_w ? qk->qk : qkv->y; // with the norm, q and k have memory of their own
    int64_t stride = qk->q_w ? qk->qk_stride : width;
    if (!mt_decode_knows_attention(a)) return false;
    if (a->value_size != D || D % 8 != 0 || D > MT_DECODE_CHANNELS || H % G != 0 || a->dropout.p > 0) return false;
    if (a->backend != MT_ATTENTION_AUTO && a->backend != MT_ATTENTION_FLASH) return false;
    if (qk->T != T || qk->H != H || qk->G != G || qk->D != D || qk->qkv != qkv->y || qk->qk != heads ||
        qk->qkv_stride != width || qk->qk_stride != stride || !qk->q_w != !qk->k_w || !qk->cache_rows ||
        qk->w_offset != 0)
        return false;
    if (a->q != heads || a->q_stride != stride || a->k != qk->k_cache || a->v != qk->v_cache || a->k_stride != G * D ||
        a->v_stride != G * D || a->out_stride != H * D || a->spans.count != T)
        return false;
    for (int64_t i = 0; i < T; i++)
        if (a->spans.host[i].q_len != 1) return false;
    return is_wide({qk->q_w, qk->k_w, a->k, a->v, a->out}, {});
}

/* True if the layer's operations are those of a layer and read each other's results. */
static bool layer_fits(const layer_operations *o) {
    (void)name_all_fields;
    int64_t T = o->norm.T, C = o->norm.C, F = o->activation.F;
    const mt_attention *a = &o->attention;
    bool gated = mt_activation_rows[o->activation.activation].gated;
    const linear_operation *l = o->linears;
    if (T < 1 || T > mt_decode_most_rows(C) || C > MT_DECODE_WIDTH || !is_wide({o->input, o->end.out}, {C}))
        return false;
    if (!norm_fits(&o->norm, T, C) || !norm_fits(&o->mlp_norm, T, C) || !is_wide({o->mlp_norm.sum}, {})) return false;
    if (!o->norm.mean != !o->mlp_norm.mean || o->norm.eps != o->mlp_norm.eps) return false;
    if (!attention_fits(o, T) ||
        !linear_fits(&l[MT_DECODE_QKV], o->norm.y, T, (a->num_heads + 2 * a->num_groups) * a->head_size, C) ||
        !linear_fits(&l[MT_DECODE_OUT], a->out, T, C, a->num_heads * a->head_size) ||
        !linear_fits(&l[MT_DECODE_FC1], o->mlp_norm.y, T, gated ? 2 * F : F, C) ||
        !linear_fits(&l[MT_DECODE_FC2], o->activation.y, T, C, F))
        return false;
    if (o->mlp_norm.x != l[MT_DECODE_OUT].y || o->mlp_norm.residual != o->input) return false;
    if (o->activation.x != l[MT_DECODE_FC1].y || o->activation.T != T || o->activation.weights ||
        o->activation.quantize.rows.data || mt_glu_bounds(&o->activation.glu))
        return false;
    return o->end.x == l[MT_DECODE_FC2].y && o->end.residual == o->mlp_norm.sum && o->end.T == T && o->end.C == C &&
           o->end.first_channel == 0 && o->end.dropout.p <= 0;
}

/* The numbers of the kernel's arguments that every layer must have. */
static mt_decode_task task_of(const layer_operations *o) {
    mt_decode_task t;
    const mt_attention *a = &o->attention;
    memset(&t, 0, sizeof t); // padding too: tasks are compared
    t.T = (int)o->norm.T, t.C = (int)o->norm.C, t.F = (int)o->activation.F;
    t.H = (int)a->num_heads, t.G = (int)a->num_groups, t.D = (int)a->head_size;
    t.layernorm = o->norm.mean != NULL, t.activation = o->activation.activation;
    t.eps = o->norm.eps, t.qk_eps = o->qk.eps, t.scale = a->scale, t.window = a->window;
    t.spans = a->spans.device, t.pages = a->pages, t.cache_rows = o->qk.cache_rows;
    const mt_rotation *r = &o->qk.rotation;
    t.rotation.cos = r->cos, t.rotation.sin = r->sin, t.rotation.positions = r->positions;
    t.rotation.R = r->R, t.rotation.interleaved = r->interleaved;
    t.qkv = (__nv_bfloat16 *)o->linears[MT_DECODE_QKV].y, t.attended = (__nv_bfloat16 *)a->out;
    t.active = (__nv_bfloat16 *)o->activation.y;
    bool gated = mt_activation_rows[t.activation].gated;
    for (int j = 0; j < MT_DECODE_PRODUCTS; j++) {
        int64_t N = o->linears[j].N, K = o->linears[j].K;
        bool halves = gated && j == MT_DECODE_FC1;
        t.products[j] = {(int)N / 2, halves ? 1 : 2, halves ? t.F : 1, (int)K, (int)mt_divide_up(K, 256), 0};
    }
    return t;
}

static mt_decode_layer layer_of(const layer_operations *o) {
    typedef const __nv_bfloat16 *row;
    mt_decode_layer l = {};
    for (int j = 0; j < MT_DECODE_PRODUCTS; j++) l.w[j] = (row)o->linears[j].w, l.bias[j] = (row)o->linears[j].bias;
    l.norm_w[0] = (row)o->norm.w, l.norm_w[1] = (row)o->mlp_norm.w;
    l.norm_b[0] = o->norm.mean ? (row)o->norm.b : NULL, l.norm_b[1] = o->norm.mean ? (row)o->mlp_norm.b : NULL;
    l.q_norm = (row)o->qk.q_w, l.k_norm = (row)o->qk.k_w, l.input = (row)o->input;
    l.middle = (__nv_bfloat16 *)o->mlp_norm.sum, l.output = (__nv_bfloat16 *)o->end.out;
    l.k_cache = (__nv_bfloat16 *)o->attention.k, l.v_cache = (__nv_bfloat16 *)o->attention.v;
    return l;
}

/* Adds the layer that has ended. False: it is none, or has another shape. */
static bool add_layer(mt_decode_record *r) {
    if (!layer_fits(&r->now) || r->layers.size() == MT_DECODE_LAYERS) return false;
    mt_decode_task task = task_of(&r->now);
    if (r->layers.empty()) r->task = task;
    task.qkv = r->task.qkv, task.attended = r->task.attended, task.active = r->task.active; // the first's serve all
    if (memcmp(&task, &r->task, sizeof task) != 0) return false;
    r->layers.push_back(layer_of(&r->now));
    return true;
}

/* ---- the launch -------------------------------------------------------------------------------------------------- */

/* The warps of a product's teams: as many as shorten the work of the units of a block. */
static int team_bits(const mt_decode_product *p, int64_t blocks) {
    int64_t units = mt_divide_up(p->units, blocks); // of a block
    int bits = 0;
    while (units <= MT_DECODE_LOADERS >> (bits + 1) && 2 << bits <= p->chunks) bits++;
    return bits;
}

/* Bytes of a block's shared memory after the ring and the layers: a product's input, or attention. */
static int64_t phase_bytes(const mt_decode_task *t) {
    int64_t widest = 0, heads = t->H / t->G < MT_DECODE_HEADS ? t->H / t->G : MT_DECODE_HEADS;
    for (const mt_decode_product &p : t->products) widest = p.K > widest ? p.K : widest;
    int64_t rows = t->T * widest * 2, q = MT_DECODE_HEADS * t->D * 4, news = 2 * t->D * 2;
    int64_t attention = q + news + MT_DECODE_WARPS * (heads * (t->D + 2) * 4);
    return rows > attention ? rows : attention;
}

/* Enqueues the kernel for the layers that were recorded. Its blocks wait for each other, so all must be resident: a
 * cooperative launch makes sure of it. False: it does not fit this GPU. */
static bool launch(mt_decode_record *r, mt_stream *stream) {
    mt_decode_task *t = &r->task;
    const cudaDeviceProp *device = mt_cuda_device();
    int slots, blocks = device->multiProcessorCount, resident = 0;
    mt_decode_kernel *kernel = mt_decode_kernel_of(t->T, &slots);
    int64_t per_group = t->H / t->G, tiles = mt_divide_up(per_group, MT_DECODE_HEADS);
    t->num_layers = (int)r->whole_layers;
    t->arrived = (uint32_t *)r->memory;
    t->layers = (const mt_decode_layer *)(r->memory + counter_bytes), t->maps = r->memory + maps_begin;
    t->ring_bytes = slots * MT_DECODE_LOADERS * 1024;
    t->layer_bytes = (int)mt_divide_up(t->num_layers * (int64_t)sizeof(mt_decode_layer), 16) * 16;
    int64_t shared = t->ring_bytes + t->layer_bytes + phase_bytes(t), splits = blocks / (t->T * t->G * tiles);
    t->splits = (int)(splits < 1 ? 1 : splits < MT_DECODE_SPLITS ? splits : MT_DECODE_SPLITS);
    r->maps.assign(r->whole_layers * map_bytes, 0);
    if (mt_decode_launch_clusters(t, r->layers.data(), r->maps.data(), stream)) {
        num_fused++, num_in_clusters++;
        return r->launched = true;
    }
    for (mt_decode_product &p : t->products) p.team_bits = team_bits(&p, blocks);
    int64_t parts = (int64_t)t->T * t->H * t->splits;
    cudaFuncAttributes attributes;
    MT_CUDA(cudaFuncGetAttributes(&attributes, kernel));
    if (!device->cooperativeLaunch ||
        shared + (int64_t)attributes.sharedSizeBytes > (int64_t)device->sharedMemPerBlockOptin ||
        parts * (t->D + 2) * 4 > stream->workspace_bytes)
        return false;
    mt_cuda_take_shared(kernel, shared);
    MT_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, 32 * MT_DECODE_WARPS, (size_t)shared));
    if (resident < 1) return false;
    t->sums = (float *)mt_cuda_workspace(stream, parts * (t->D + 2) * 4);
    t->maxima = (float2 *)(t->sums + parts * t->D);
    cudaLaunchAttribute cooperative;
    cudaLaunchConfig_t config = {};
    cooperative.id = cudaLaunchAttributeCooperative, cooperative.val.cooperative = 1;
    config.gridDim = blocks, config.blockDim = 32 * MT_DECODE_WARPS, config.dynamicSmemBytes = (size_t)shared;
    config.stream = stream->stream, config.attrs = &cooperative, config.numAttrs = 1;
    MT_CUDA(cudaLaunchKernelEx(&config, kernel, *t));
    num_fused++;
    return r->launched = true;
}

/* ---- recordings -------------------------------------------------------------------------------------------------- */

void mt_decode_begin(mt_stream *stream) {
    if (!fuses || !stream->workspace) return;
    mt_decode_record *r = stream->record = new mt_decode_record;
    int64_t bytes = maps_begin + MT_DECODE_LAYERS * map_bytes;
    MT_CUDA(cudaMalloc((void **)&r->memory, (size_t)bytes));
    MT_CUDA(cudaMemsetAsync(r->memory, 0, (size_t)bytes, stream->stream));
}

void mt_decode_flush(mt_stream *stream) {
    mt_decode_record *r = stream->record;
    if (r->operations.empty()) return;
    r->state = CLOSED;
    size_t done = r->whole_layers > 0 && launch(r, stream) ? r->whole_operations : 0;
    for (size_t i = done; i < r->operations.size(); i++) r->operations[i]();
    r->operations.clear();
}

void *mt_decode_end(mt_stream *stream) {
    mt_decode_record *r = stream->record;
    if (!r) return NULL;
    MT_CHECK(r->operations.empty()); // the table flushed them before graph_end
    if (r->launched) {
        MT_CUDA(cudaMemcpyAsync(r->memory + counter_bytes, r->layers.data(), r->layers.size() * sizeof(mt_decode_layer),
                                cudaMemcpyHostToDevice, stream->stream));
        MT_CUDA(cudaMemcpyAsync(r->memory + maps_begin, r->maps.data(), r->maps.size(), cudaMemcpyHostToDevice,
                                stream->stream));
    }
    void *memory = r->memory;
    stream->record = NULL;
    delete r;
    return memory;
}

void mt_decode_free(void *memory) {
    if (memory) MT_CUDA(cudaFree(memory));
}

/* ---- operations -------------------------------------------------------------------------------------------------- */

/* The open recording of a stream that expects an operation in one of the states; an operation that it does not expect
 * ends it. */
static mt_decode_record *expecting(mt_stream *stream, mt_dtype dtype, std::initializer_list<record_state> states) {
    mt_decode_record *r = stream ? stream->record : NULL;
    if (!r || r->state == CLOSED) return NULL;
    for (record_state state : states)
        if (r->state == state && dtype == MT_BF16) return r;
    mt_decode_flush(stream);
    return NULL;
}

static bool keep(mt_decode_record *r, record_state next, std::function<void()> operation) {
    r->operations.push_back(std::move(operation));
    r->state = next;
    return true;
}

/* The sum over one rank is no operation. */
bool mt_decode_record_all_reduce(void *buffer, int64_t count, mt_reduction reduction, mt_dtype dtype,
                                 const mt_group *group, mt_stream *stream) {
    (void)buffer, (void)count, (void)reduction, (void)dtype;
    if (group->size > 1) mt_decode_flush_if(stream);
    return false;
}

static bool record_norm(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream, mt_rmsnorm_forward_fn *forward) {
    mt_decode_record *r = expecting(stream, dtype, {FIRST_NORM});
    mt_norm_args norm = *a;
    if (!r) return false;
    bool packed = a->mean || (a->H == 1 && a->x_stride == a->C && a->y_stride == a->C);
    if (!packed || (!r->layers.empty() && a->x != r->layers.back().output)) {
        mt_decode_flush(stream);
        return false;
    }
    r->now = {}, r->now.norm = norm, r->now.input = a->x;
    return keep(r, QKV, [=] { forward(&norm, dtype, stream); });
}

bool mt_decode_record_layernorm_forward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    return record_norm(a, dtype, stream, mt_cuda_layernorm_forward);
}

bool mt_decode_record_rmsnorm_forward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    return record_norm(a, dtype, stream, mt_cuda_rmsnorm_forward);
}

bool mt_decode_record_linear_forward(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_decode_record *r = expecting(stream, dtype, {QKV, OUT, FC1, FC2});
    mt_linear_args call = *a;
    if (!r) return false;
    record_state state = r->state;
    int j = state == QKV ? MT_DECODE_QKV : state == OUT ? MT_DECODE_OUT : state == FC1 ? MT_DECODE_FC1 : MT_DECODE_FC2;
    r->now.linears[j] = {a->y, a->x, a->w, a->bias, a->T, a->N, a->K};
    return keep(r, (record_state)(state + 1), [=] { mt_cuda_linear_forward(&call, dtype, stream); });
}

bool mt_decode_record_linear_gelu_forward(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_decode_record *r = expecting(stream, dtype, {FC1});
    mt_linear_args call = *a;
    if (!r) return false;
    r->now.linears[MT_DECODE_FC1] = {a->pre, a->x, a->w, a->bias, a->T, a->N, a->K};
    mt_activation_args *gelu = &r->now.activation;
    gelu->T = a->T, gelu->F = a->N, gelu->activation = MT_ACTIVATION_GELU_TANH, gelu->x = a->pre, gelu->y = a->y;
    return keep(r, FC2, [=] { mt_cuda_linear_gelu_forward(&call, dtype, stream); });
}

bool mt_decode_record_qk_forward(const mt_qk_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_decode_record *r = expecting(stream, dtype, {QK});
    mt_qk_args qk = *a;
    if (!r) return false;
    r->now.qk = qk;
    return keep(r, ATTENTION, [=] { mt_cuda_qk_forward(&qk, dtype, stream); });
}

bool mt_decode_record_attention_forward(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    mt_decode_record *r = expecting(stream, dtype, {ATTENTION});
    mt_attention call = *a;
    if (!r) return false;
    r->now.attention = call;
    return keep(r, OUT, [=] { mt_cuda_attention_forward(&call, dtype, stream); });
}

bool mt_decode_record_activation_forward(const mt_activation_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_decode_record *r = expecting(stream, dtype, {ACTIVATION});
    mt_activation_args call = *a;
    if (!r) return false;
    r->now.activation = call;
    return keep(r, FC2, [=] { mt_cuda_activation_forward(&call, dtype, stream); });
}

/* The end of an MLP and its layer. */
static bool end_layer(mt_decode_record *r, const mt_dropout_add_args *end, mt_stream *stream) {
    r->now.end = *end;
    if (add_layer(r)) return true;
    mt_decode_flush(stream);
    return false;
}

bool mt_decode_record_residual_norm_forward(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_decode_record *r = expecting(stream, dtype, {MLP_NORM, LAST});
    mt_norm_args norm = *a;
    if (!r) return false;
    record_state next = FC1;
    if (r->state == MLP_NORM) {
        r->now.mlp_norm = norm;
    } else {
        mt_dropout_add_args end = {a->T, a->C, 0, a->token_index, a->x, a->residual, a->sum, a->dropout};
        if (!end_layer(r, &end, stream)) return false;
        r->now = {}, r->now.norm = norm, r->now.input = a->sum, next = QKV;
    }
    return keep(r, next, [=] { mt_cuda_residual_norm_forward(&norm, dtype, stream); });
}

bool mt_decode_record_dropout_add_forward(const mt_dropout_add_args *a, mt_dtype dtype, mt_stream *stream) {
    mt_decode_record *r = expecting(stream, dtype, {LAST});
    mt_dropout_add_args end = *a;
    if (!r || !end_layer(r, &end, stream)) return false;
    keep(r, FIRST_NORM, [=] { mt_cuda_dropout_add_forward(&end, dtype, stream); });
    r->whole_operations = r->operations.size(), r->whole_layers = r->layers.size();
    return true;
}
