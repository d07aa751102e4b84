/* rows_in_fp8.h: rows that the operation which computes them quantizes, against separate operations of the same
 * backend, bit for bit: the rows, their transpose, the inverse scale and amax. The suite defines random_float(), in
 * [-1, 1). */
#ifndef MT_ROWS_IN_FP8_H
#define MT_ROWS_IN_FP8_H

typedef struct stored_rows {
    const mt_ops *ops;
    mt_stream *on;
    mt_dtype format;
    bool records; // amax
    int64_t M, C, num_experts;
    int32_t *offsets; // [num_experts + 1] in the backend's memory; NULL: rows of no experts
    float *numbers;   // there too: the scale, amax, inverse scales of rows and columns
} stored_rows;

static void *rows_copy(const stored_rows *e, const void *host, int64_t bytes) {
    void *memory = e->ops->memory_alloc(bytes + 16);
    e->ops->memory_copy(memory, host, bytes, e->on);
    e->ops->stream_synchronize(e->on);
    return memory;
}

static void *rows_fetch(const stored_rows *e, void *memory, int64_t bytes) {
    void *host = mt_malloc(bytes + 16);
    e->ops->memory_copy(host, memory, bytes, e->on);
    e->ops->stream_synchronize(e->on);
    e->ops->memory_free(memory);
    return host;
}

/* n values in bf16 over several octaves, some beyond the largest number of e4m3 after scaling, some 0; NaN from `end`
 * on. */
static void *rows_values(const stored_rows *e, int64_t n, int64_t end) {
    uint16_t *bits = mt_malloc(n * 2);
    for (int64_t i = 0; i < n; i++) {
        float x = ldexpf(random_float(), (int)(i % 11) - 2);
        bits[i] = mt_f32_to_bf16(i >= end ? NAN : i % 29 == 0 ? 0 : x);
    }
    void *x = rows_copy(e, bits, n * 2);
    free(bits);
    return x;
}

/* Arguments for rows in `rows`; the transpose too, if there is memory for it. */
static mt_quantize_args rows_args(const stored_rows *e, const void *x, void *rows, void *columns) {
    static const float numbers[] = {3.7f, 0.125f, 7, 7};
    mt_quantize_args a = {.x = x, .count = 1, .R = e->M, .C = e->C, .offsets = e->offsets};
    e->ops->memory_copy(e->numbers, numbers, sizeof numbers, e->on);
    a.num_experts = e->num_experts, a.scale = e->numbers, a.amax = e->records ? e->numbers + 1 : NULL;
    a.rows = (mt_fp8_matrix){rows, e->numbers + 2, e->C, e->format, MT_FP8_TENSOR};
    a.columns = (mt_fp8_matrix){columns, e->numbers + 3, 0, e->format, MT_FP8_TENSOR};
    a.columns.stride = mt_fp8_stride(e->M + e->num_experts * (MT_FP8_EXPERT_ROWS - 1), MT_FP8_TENSOR);
    return a;
}

/* Transposes the rows in `a`, and compares with a quantization of x: what is not an expert's row may differ. */
static void rows_check(const stored_rows *e, const char *what, mt_quantize_args a, void *x, const int32_t *offsets) {
    const mt_ops *ops = e->ops;
    float *numbers[2];
    uint8_t *rows[2], *columns[2];
    int64_t row_bytes = e->M * e->C, column_bytes = e->C * a.columns.stride;
    a.position = NULL, a.offsets = e->offsets;
    for (int i = 0; i < 2; i++) {
        if (i == 1) a = rows_args(e, x, ops->memory_alloc(row_bytes + 16), NULL);
        a.columns.data = ops->memory_alloc(column_bytes + 16);
        if (i == 0) ops->fp8_transpose(&a, e->on);
        if (i == 1) ops->quantize(&a, MT_BF16, e->on);
        numbers[i] = mt_malloc(4 * 4 + 16);
        ops->memory_copy(numbers[i], e->numbers, 4 * 4, e->on);
        rows[i] = rows_fetch(e, a.rows.data, row_bytes), columns[i] = rows_fetch(e, a.columns.data, column_bytes);
    }
    if (memcmp(numbers[0], numbers[1], 16) != 0)
        fail_msg("%s: amax is %g, not %g; inverse scales are %g %g, not %g", what, (double)numbers[0][1],
                 (double)numbers[1][1], (double)numbers[0][2], (double)numbers[0][3], (double)numbers[1][2]);
    for (int64_t i = offsets ? offsets[0] * e->C : 0; i < (offsets ? offsets[e->num_experts] : e->M) * e->C; i++)
        if (rows[0][i] != rows[1][i])
            fail_msg("%s: row %d, column %d is %02x, not %02x", what, (int)(i / e->C), (int)(i % e->C), rows[0][i],
                     rows[1][i]);
    for (int64_t i = 0; i < column_bytes; i++)
        if (columns[0][i] != columns[1][i])
            fail_msg("%s: the transpose at %d, %d is %02x, not %02x", what, (int)(i / a.columns.stride),
                     (int)(i % a.columns.stride), columns[0][i], columns[1][i]);
    for (int i = 0; i < 2; i++) free(numbers[i]), free(rows[i]), free(columns[i]);
}

/* quantize with positions, against gather_rows and quantize. Token 1 has no expert and the largest values; others lose
 * some of their choices. With `compact` the transpose is made from the tokens' own rows. */
static void rows_check_positions(stored_rows *e, int64_t T, int64_t k, bool compact) {
    int64_t E = e->num_experts, n = T * k;
    int32_t *position = mt_malloc(n * 4), *token = mt_malloc(n * 4), *offsets = mt_calloc((E + 1) * 4), row = 0;
    for (int64_t expert = 0; expert < E; expert++) { // choice i goes to expert (7 t + 3 i) % E
        for (int64_t i = 0; i < n; i++) {
            int64_t t = i / k;
            if ((7 * t + 3 * (i % k)) % E != expert) continue;
            position[i] = t == 1 || i % 13 == 5 ? -1 : row;
            if (position[i] >= 0) token[row++] = (int32_t)t;
        }
        offsets[expert + 1] = row;
    }
    e->M = row;
    uint16_t *host = mt_malloc(T * e->C * 2);
    for (int64_t i = 0; i < T * e->C; i++)
        host[i] = mt_f32_to_bf16(i / e->C == 1 ? 1e9f : ldexpf(random_float(), (int)(i % 12) - 3));
    void *x = rows_copy(e, host, T * e->C * 2), *gathered = e->ops->memory_alloc(e->M * e->C * 2);
    int32_t *tokens = rows_copy(e, token, e->M * 4), *positions = rows_copy(e, position, n * 4);
    e->offsets = rows_copy(e, offsets, (E + 1) * 4);
    mt_quantize_args a = rows_args(e, x, e->ops->memory_alloc((e->M + T) * e->C + 16), NULL);
    a.R = T, a.position = positions, a.copies = k, a.offsets = NULL, a.compact = compact ? e->M : 0;
    e->ops->quantize(&a, MT_BF16, e->on);
    a.R = e->M, a.source = compact ? tokens : NULL;
    e->ops->gather_rows(&(mt_row_args){e->M, e->C, tokens, .from = x, .to = gathered}, MT_BF16, e->on);
    rows_check(e, "positions", a, gathered, offsets);
    e->ops->memory_free(x), e->ops->memory_free(gathered), e->ops->memory_free(tokens);
    e->ops->memory_free(positions), e->ops->memory_free(e->offsets);
    free(host), free(position), free(token), free(offsets);
}

/* An activation and its backward; nothing is stored where the results in bf16 would be. With offsets it has weights,
 * and rows of no expert have NaN around those of experts. */
static void rows_check_activation(stored_rows *e, mt_activation activation, int64_t F, const int32_t *offsets) {
    const mt_ops *ops = e->ops;
    int64_t width = mt_activation_rows[activation].gated ? 2 * F : F, M = e->M;
    int64_t end = offsets ? offsets[e->num_experts] : M;
    float *host = mt_malloc(M * 4);
    for (int64_t i = 0; i < M; i++) host[i] = 0.5f + 0.5f * random_float();
    void *x = rows_values(e, M * width, end * width), *dy = rows_values(e, M * F, M * F);
    float *weights = rows_copy(e, host, M * 4), *dweights[2] = {rows_copy(e, host, M * 4), rows_copy(e, host, M * 4)};
    void *result = ops->memory_alloc(M * width * 2);
    e->offsets = offsets ? rows_copy(e, offsets, (e->num_experts + 1) * 4) : NULL;
    mt_activation_args a = {M, F, activation, x, offsets ? weights : NULL, .y = result};
    e->C = F;
    ops->activation_forward(&a, MT_BF16, e->on);
    a.y = NULL, a.quantize = rows_args(e, NULL, ops->memory_alloc(M * F + 16), NULL);
    ops->activation_forward(&a, MT_BF16, e->on);
    rows_check(e, "activation", a.quantize, result, offsets);
    e->C = width;
    a = (mt_activation_args){M, F, activation, x, a.weights, .dy = dy, .dx = result};
    a.dweights = offsets ? dweights[0] : NULL;
    ops->activation_backward(&a, MT_BF16, e->on);
    a.dx = NULL, a.dweights = offsets ? dweights[1] : NULL;
    a.quantize = rows_args(e, NULL, ops->memory_alloc(M * width + 16), NULL);
    ops->activation_backward(&a, MT_BF16, e->on);
    rows_check(e, "gradient", a.quantize, result, offsets);
    float *want = rows_fetch(e, dweights[0], M * 4), *got = rows_fetch(e, dweights[1], M * 4);
    assert_memory_equal(want, got, (size_t)end * 4);
    ops->memory_free(x), ops->memory_free(dy), ops->memory_free(weights), ops->memory_free(result);
    if (e->offsets) ops->memory_free(e->offsets);
    free(host), free(want), free(got);
}

/* All of it, in both formats, with and without a record of amax. */
static void check_rows_in_place(const mt_ops *ops, mt_stream *on) {
    static const mt_activation activations[] = {MT_ACTIVATION_SWIGLU, MT_ACTIVATION_GELU_TANH};
    static const int32_t offsets[] = {0, 100, 100, 228, 357, 358};
    for (int i = 0; i < 4; i++) {
        stored_rows e = {ops, on, i % 2 ? MT_F8_E5M2 : MT_F8_E4M3, i / 2 == 0, .numbers = ops->memory_alloc(16)};
        for (int a = 0; a < 2; a++) {
            e.M = 400, e.num_experts = 5;
            rows_check_activation(&e, activations[a], i % 2 ? 768 : 48, offsets);
        }
        for (int s = 0; s < 3; s++) {
            e.num_experts = s == 2 ? 40 : 6, e.C = s == 0 ? 48 : s == 1 ? 1040 : 144;
            rows_check_positions(&e, s == 2 ? 300 : 90, s == 0 ? 1 : s == 1 ? 3 : 11, s > 0);
        }
        ops->memory_free(e.numbers);
    }
}

/* A norm of M rows, or with `adds` of a residual with dropout; its other results are those of the norm in bf16. */
static void rows_check_norm(stored_rows *e, bool layernorm, bool adds) {
    const mt_ops *ops = e->ops;
    int64_t M = e->M, C = e->C, *index = mt_malloc(M * 8);
    for (int64_t i = 0; i < M; i++) index[i] = 3 * i + 1;
    void *x = rows_values(e, M * C, M * C), *residual = rows_values(e, M * C, M * C), *y = ops->memory_alloc(M * C * 2);
    void *w = rows_values(e, C, C), *b = rows_values(e, C, C), *sums[2], *host[2];
    int64_t *token_index = rows_copy(e, index, M * 8);
    float *statistics[2];
    for (int i = 0; i < 2; i++) {
        statistics[i] = ops->memory_alloc(2 * M * 4), sums[i] = ops->memory_alloc(M * C * 2);
        mt_norm_args a = {.T = M, .H = 1, .C = C, .x = x, .w = w, .b = layernorm ? b : NULL, .eps = 1e-5f};
        a.x_stride = a.y_stride = C, a.rstd = statistics[i], a.mean = layernorm ? statistics[i] + M : NULL;
        a.residual = residual, a.sum = sums[i], a.token_index = token_index,
        a.dropout = (mt_dropout){.p = 0.1, .key = 9};
        if (i == 0) a.y = y;
        if (i == 1) a.quantize = rows_args(e, NULL, ops->memory_alloc(M * C + 16), NULL);
        if (adds)
            ops->residual_norm_forward(&a, MT_BF16, e->on);
        else
            (layernorm ? ops->layernorm_forward : ops->rmsnorm_forward)(&a, MT_BF16, e->on);
        if (i == 1) rows_check(e, layernorm ? "LayerNorm" : "RMSNorm", a.quantize, y, NULL);
    }
    for (int i = 0; i < 2; i++)
        statistics[i] = rows_fetch(e, statistics[i], 2 * M * 4), host[i] = rows_fetch(e, sums[i], M * C * 2);
    assert_memory_equal(statistics[0], statistics[1], (size_t)M * (layernorm ? 8 : 4));
    if (adds) assert_memory_equal(host[0], host[1], (size_t)(M * C) * 2);
    void *memory[] = {x, residual, y, w, b, token_index};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) ops->memory_free(memory[i]);
    for (int i = 0; i < 2; i++) free(statistics[i]), free(host[i]);
    free(index);
}

/* Rows held by one warp, by a block, and read in pieces; both norms, and after a residual if the backend has that. */
static void check_norms_in_place(const mt_ops *ops, mt_stream *on) {
    static const int64_t sizes[][2] = {{1, 16},    {7, 48},    {90, 256},  {33, 768},  {129, 1040},
                                       {20, 1600}, {37, 2048}, {19, 3072}, {21, 4096}, {9, 5120},
                                       {11, 6400}, {5, 8192},  {6, 10240}, {3, 11280}, {4, 12288},
                                       {3, 14336}, {3, 16384}, {2, 16400}, {3, 20480}};
    for (int i = 0; i < (ops->residual_norm_forward ? 8 : 4); i++)
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
            stored_rows e = {ops, on, MT_F8_E4M3, i / 2 % 2 == 0, .M = sizes[k][0], .C = sizes[k][1]};
            e.numbers = ops->memory_alloc(16);
            rows_check_norm(&e, i % 2, i / 4);
            ops->memory_free(e.numbers);
        }
}

/* Rows of no experts: the activations of an MLP, in both formats, with and without a record of amax. */
static void check_activations_in_place(const mt_ops *ops, mt_stream *on) {
    static const int64_t sizes[][2] = {{1, 16}, {3, 48}, {100, 176}, {129, 784}, {260, 4112}, {40, 9600}};
    for (int i = 0; i < 4 * MT_NUM_ACTIVATIONS; i++)
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
            stored_rows e = {ops, on, i % 2 ? MT_F8_E5M2 : MT_F8_E4M3, i / 2 % 2 == 0, .M = sizes[k][0]};
            e.numbers = ops->memory_alloc(16);
            rows_check_activation(&e, (mt_activation)(i / 4), sizes[k][1], NULL);
            ops->memory_free(e.numbers);
        }
}

#endif
