/* bench_calibrate.c: measures the numbers of a machine's file (data/plan/machine.h) and writes the file.
 *
 *   usage: bench_calibrate BASE.json OUT.json              one GPU: products, attention, copies
 *          mpirun -np N bench_calibrate BASE.json OUT.json  and the links between N GPUs of a host
 *
 * The name and numbers that are not measured here, such as the peak rate, are those of BASE.json. Each is measured for
 * some seconds, so that a GPU that throttles in training does so here. */
#include "../data/base/file.h"
#include "../data/plan/machine.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifndef MT_HAVE_CUDA
int main(void) {
    mt_die("this build has no CUDA, so no GPU can be measured; build with CUDA, or write a machine's file by hand, "
           "from one of data/machines");
}
#else

enum { TOKENS = 65536, WIDTH = 8192, BATCHES = 5 };

typedef struct bench {
    mt_grid grid;
    const mt_ops *ops;
    mt_stream *stream;
    mt_event *from, *to;
    char *pool; // [6 GiB]
    json_t *file;
} bench;

static const int64_t pool_bytes = (int64_t)6 << 30;

/* An operation that enqueues itself once. */
typedef void enqueue_fn(bench *b, const int64_t *n);

/* Median seconds of a call: batches of about a third of a second. */
static double measure(bench *b, enqueue_fn *enqueue, const int64_t *n) {
    double seconds[BATCHES];
    int64_t calls = 4;
    for (int batch = -2; batch < BATCHES; batch++) { // two batches find the number of calls, and choose algorithms
        mt_cuda_event_record(b->from, b->stream);
        for (int64_t i = 0; i < calls; i++) enqueue(b, n);
        mt_cuda_event_record(b->to, b->stream);
        double one = mt_cuda_event_seconds(b->from, b->to) / (double)calls;
        mt_all_reduce_max(&b->grid.world, &one, 1, MT_F64); // the slowest rank; and equal calls on all
        if (batch < 0) calls = mt_max(2, (int64_t)(0.3 / one));
        if (batch >= 0) seconds[batch] = one;
    }
    for (int i = 0; i < BATCHES; i++)
        for (int j = i + 1; j < BATCHES; j++)
            if (seconds[j] < seconds[i]) {
                double swap = seconds[i];
                seconds[i] = seconds[j], seconds[j] = swap;
            }
    return seconds[BATCHES / 2];
}

/* Replaces a number of the file, in the file's unit. */
static void put(bench *b, const char *key, double value) {
    char text[32];
    snprintf(text, sizeof text, "%.4g", value);
    value = strtod(text, NULL);
    if (b->grid.world.rank == 0) printf("%-32s %s\n", key, text);
    snprintf(text, sizeof text, "make calibrate, %d GPU%s", b->grid.world.size, b->grid.world.size > 1 ? "s" : "");
    json_object_set_new(b->file, key, json_pack("{s:f, s:s}", "value", value, "source", text));
}

static double number(const bench *b, const char *key) {
    return json_number_value(json_object_get(json_object_get(b->file, key), "value"));
}

/* ---- memory and products */

static void copy(bench *b, const int64_t *n) {
    b->ops->memory_copy(b->pool, b->pool + pool_bytes / 2, n[0], b->stream);
}

static void product(bench *b, const int64_t *n) { // T, N, K
    char *y = b->pool, *x = b->pool + ((int64_t)2 << 30), *w = b->pool + ((int64_t)4 << 30);
    b->ops->linear_forward(&(mt_linear_args){n[0], n[1], n[2], .x = x, .w = w, .y = y}, MT_BF16, b->stream);
}

static void measure_copies(bench *b) {
    const int64_t bytes[] = {(int64_t)2 << 30};
    put(b, "copy_gbs", 2e-9 * (double)bytes[0] / measure(b, copy, bytes));
}

/* Seconds of the inner loop per result, of products whose tiles are whole: 2 (K + depth) / rate. */
static double loop_seconds(bench *b, const int64_t *n) {
    double results = (double)(n[0] * n[1]), tiles = results / (128 * 256), sms = number(b, "multiprocessors");
    double idle = (ceil(tiles / sms) * sms + tiles) / 2 / tiles;
    double written = 2 * results / (1e9 * number(b, "copy_gbs"));
    return (measure(b, product, n) - written - 1e-6 * number(b, "kernel_us")) / (results * idle);
}

static void measure_products(bench *b) {
    const int64_t deep[] = {WIDTH, WIDTH, WIDTH}, shallow[] = {TOKENS, 3072, 768};
    double steep = loop_seconds(b, deep), flat = loop_seconds(b, shallow);
    double rate = 2 * (double)(deep[2] - shallow[2]) / (steep - flat);
    put(b, "bf16_product_tflops", 1e-12 * rate);
    put(b, "product_depth", fmax(flat * rate / 2 - (double)shallow[2], 0));
}

/* ---- attention */

static mt_attention attention_of(bench *b, const int64_t *n, mt_span *spans) { // length, sequences, heads, channels
    int64_t rows = n[0] * n[1], width = n[2] * n[3];
    char *at = b->pool;
    mt_arena arena = {.base = at, .capacity = pool_bytes};
    mt_attention a = {.num_heads = n[2], .num_groups = n[2], .head_size = n[3], .value_size = n[3]};
    void *q = mt_arena_alloc(&arena, 3 * rows * width * 2), *dq = mt_arena_alloc(&arena, 3 * rows * width * 2);
    a.q = q, a.k = (uint16_t *)q + width, a.v = (uint16_t *)q + 2 * width;
    a.dq = dq, a.dk = (uint16_t *)dq + width, a.dv = (uint16_t *)dq + 2 * width;
    a.out = mt_arena_alloc(&arena, rows * width * 2), a.dout = mt_arena_alloc(&arena, rows * width * 2);
    a.lse = mt_arena_alloc(&arena, rows * n[2] * 4), a.row_dot = mt_arena_alloc(&arena, rows * n[2] * 4);
    a.q_stride = a.k_stride = a.v_stride = 3 * width, a.out_stride = width, a.scale = 0.1f;
    for (int64_t i = 0; i < n[1]; i++) spans[i] = (mt_span){i * n[0], n[0], i * n[0], n[0], true};
    a.spans = (mt_spans){spans, mt_arena_alloc(&arena, n[1] * (int64_t)sizeof *spans), n[1]};
    return a;
}

static mt_attention at_work; // of the calls below
static void attention_forward(bench *b, const int64_t *n) {
    (void)n;
    b->ops->attention_forward(&at_work, MT_BF16, b->stream);
}
static void attention_backward(bench *b, const int64_t *n) {
    (void)n;
    b->ops->attention_backward(&at_work, MT_BF16, b->stream);
}

/* Operations per second of causal attention, forward or backward. */
static double attention_rate(bench *b, int64_t length, int64_t channels, bool backward) {
    const int64_t n[] = {length, 16384 / length, 16, channels};
    mt_span spans[16];
    at_work = attention_of(b, n, spans);
    b->ops->memory_copy((void *)at_work.spans.device, spans, n[1] * (int64_t)sizeof *spans, b->stream);
    b->ops->attention_forward(&at_work, MT_BF16, b->stream);
    double pairs = (double)(n[1] * n[2]) * (double)length * (double)(length + 1) / 2;
    double flops = 4 * pairs * (double)channels * (backward ? 2.5 : 1);
    return flops / measure(b, backward ? attention_backward : attention_forward, n);
}

/* Rates at two lengths give the rate of long sequences and the length of half of it. */
static void measure_attention(bench *b) {
    double sum = 0;
    for (int64_t channels = 64; channels <= 128; channels += 64)
        for (int backward = 0; backward < 2; backward++) {
            double brief = attention_rate(b, 1024, channels, backward),
                   lengthy = attention_rate(b, 8192, channels, backward);
            double half = (lengthy - brief) / (brief / 1024 - lengthy / 8192);
            char key[64];
            snprintf(key, sizeof key, "attention_%d_%sward_tflops", (int)channels, backward ? "back" : "for");
            put(b, key, 1e-12 * lengthy * (1 + half / 8192));
            sum += half / 4;
        }
    put(b, "attention_tokens", fmax(sum, 0));
}

/* ---- links within a host */

static void all_reduce(bench *b, const int64_t *n) {
    b->ops->all_reduce(b->pool, n[0], MT_SUM, MT_BF16, &b->grid.data, b->stream);
}
static void all_gather(bench *b, const int64_t *n) {
    b->ops->all_gather(b->pool, b->pool + pool_bytes / 2, n[0], MT_BF16, &b->grid.data, b->stream);
}
static void all_to_all(bench *b, const int64_t *n) {
    b->ops->all_to_all(b->pool, b->pool + pool_bytes / 2, n[0], MT_BF16, &b->grid.data, b->stream);
}

static void measure_links(bench *b) {
    double ranks = b->grid.world.size;
    int64_t elements = (int64_t)256 << 20, part = elements / b->grid.world.size, few = 512;
    double reduce = measure(b, all_reduce, &elements), gather = measure(b, all_gather, &part);
    double sent = 2 * (ranks - 1) / ranks * (double)elements;
    put(b, "nvlink_reduce_gbs", 2e-9 * sent / reduce);
    put(b, "nvlink_gather_gbs", 1e-9 * sent / gather);
    put(b, "nvlink_exchange_gbs", 1e-9 * sent / measure(b, all_to_all, &part));
    put(b, "collective_us", 1e6 * measure(b, all_reduce, &few));
}

/* One number a line. */
static int write_file(const bench *b, const char *path, mt_error *error) {
    const char *key, *before = "{\n";
    json_t *item;
    mt_new_file file;
    if (mt_new_file_open(&file, path, NULL, error) != 0) return -1;
    json_object_foreach(b->file, key, item) {
        char *text = json_dumps(item, JSON_ENCODE_ANY | JSON_REAL_PRECISION(6));
        fprintf(file.stream, "%s  \"%s\": %s", before, key, text);
        free(text), before = ",\n";
    }
    fprintf(file.stream, "\n}\n");
    return mt_new_file_close(&file, 0, error);
}

int main(int argc, char **argv) {
    bench b = {.file = NULL};
    mt_machine base;
    mt_error error;
    mt_options options = {.tensor_model_parallel_size = 1, .pipeline_model_parallel_size = 1, .num_query_groups = 1};
    options.context_parallel_size = options.context_a2a_size = 1;
    mt_grid_start(&b.grid, &argc, &argv);
    if (argc != 3) mt_die("usage: bench_calibrate BASE.json OUT.json; BASE.json is a file of data/machines");
    if (mt_machine_read(&base, argv[1], &error) != 0) mt_die("%s", error.text);
    b.file = mt_json_read(argv[1], &error);
    if (!b.file) mt_die("%s", error.text);
    if (mt_grid_build(&b.grid, &options, &error) != 0) mt_die("%s", error.text);
    b.ops = mt_backend_open(MT_DEVICE_CUDA, &b.grid, &error);
    if (!b.ops) {
        if (b.grid.world.rank == 0) fprintf(stderr, "error: %s\n", error.text);
        mt_grid_stop(&b.grid);
        return 1;
    }
    int64_t workspace = b.ops->workspace_bytes(TOKENS, WIDTH, 64, 128);
    b.stream = b.ops->stream_create(b.ops->memory_alloc(workspace), workspace, false);
    b.pool = b.ops->memory_alloc(pool_bytes);
    b.ops->memory_zero(b.pool, pool_bytes, b.stream);
    b.ops->random_normal(b.pool, pool_bytes / 2, 1, 0, 0, 1, MT_BF16, b.stream); // zeros draw less power
    b.from = mt_cuda_event_create(), b.to = mt_cuda_event_create();
    measure_copies(&b), measure_products(&b), measure_attention(&b);
    if (b.grid.world.size > 1) measure_links(&b);
    if (number(&b, "bf16_product_tflops") * 1e12 > base.bf16_peak_tflops)
        mt_die("products are faster than %s's \"bf16_peak_tflops\"; take a BASE.json with the data sheet of this GPU",
               argv[1]);
    if (b.grid.world.rank == 0 && write_file(&b, argv[2], &error) != 0) mt_die("%s", error.text);
    json_decref(b.file);
    mt_grid_stop(&b.grid);
    return 0;
}
#endif
