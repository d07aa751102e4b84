/* RMSNorm in six steps from slow to fast, on a GPU: each is compared with the CPU's result and timed beside a copy.
 *
 *   make everything && build/default/notes/examples/norm_ladder
 *
 * Chapter 23 explains the steps. The last row is the library's kernel, cuda/norm.cu, for any length and type.
 */
#include "cuda/vector.cuh"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

using bf16 = __nv_bfloat16;

static constexpr int ROWS = 8192, CHANNELS = 4096, N = 8, THREADS = 128, K = CHANNELS / (N * THREADS);
static constexpr float EPS = 1e-5f;
static constexpr int64_t COUNT = (int64_t)ROWS * CHANNELS, SETS = 32; // of operands

/* y = x rstd w for each row of x[ROWS, CHANNELS], with rstd = 1 / sqrt(mean of x^2 + EPS). */
struct operands {
    bf16 *y;
    float *rstd;
    const bf16 *x, *w;
};

/* Step 1: a thread for each row. */
__global__ void thread_for_a_row(operands n) {
    int64_t row = blockIdx.x * blockDim.x + threadIdx.x;
    const bf16 *x = n.x + row * CHANNELS;
    float sum = 0;
    for (int c = 0; c < CHANNELS; c++) sum += mt_to_float(x[c]) * mt_to_float(x[c]);
    float scale = rsqrtf(sum / CHANNELS + EPS);
    for (int c = 0; c < CHANNELS; c++)
        n.y[row * CHANNELS + c] = mt_from_float<bf16>(mt_to_float(x[c]) * scale * mt_to_float(n.w[c]));
    n.rstd[row] = scale;
}

/* Step 2: a block for each row; neighbouring threads read neighbouring channels. */
__global__ void block_for_a_row(operands n) {
    int64_t row = blockIdx.x;
    const bf16 *x = n.x + row * CHANNELS;
    float sum[1] = {0};
    for (int c = threadIdx.x; c < CHANNELS; c += THREADS) sum[0] += mt_to_float(x[c]) * mt_to_float(x[c]);
    mt_row_sum(sum, 0);
    float scale = rsqrtf(sum[0] / CHANNELS + EPS);
    for (int c = threadIdx.x; c < CHANNELS; c += THREADS)
        n.y[row * CHANNELS + c] = mt_from_float<bf16>(mt_to_float(x[c]) * scale * mt_to_float(n.w[c]));
    if (threadIdx.x == 0) n.rstd[row] = scale;
}

__device__ static float squares_of(const mt_pack<bf16, N> &pack) {
    float sum = 0;
    for (int i = 0; i < N; i++) sum += mt_element(pack, i) * mt_element(pack, i);
    return sum;
}

__device__ static void store_scaled(bf16 *y, const mt_pack<bf16, N> &x, float scale, const mt_pack<bf16, N> &w) {
    mt_pack<float, N> out = mt_to_float(x);
    for (int i = 0; i < N; i++) out.value[i] *= scale * mt_element(w, i);
    mt_store(y, mt_from_float<bf16>(out));
}

/* Step 3: packs of 16 bytes. */
__global__ void packs(operands n) {
    int64_t row = blockIdx.x;
    const bf16 *x = n.x + row * CHANNELS;
    float sum[1] = {0};
    for (int c = threadIdx.x * N; c < CHANNELS; c += THREADS * N) sum[0] += squares_of(mt_load<N>(x + c));
    mt_row_sum(sum, 0);
    float scale = rsqrtf(sum[0] / CHANNELS + EPS);
    for (int c = threadIdx.x * N; c < CHANNELS; c += THREADS * N)
        store_scaled(n.y + row * CHANNELS + c, mt_load<N>(x + c), scale, mt_load<N>(n.w + c));
    if (threadIdx.x == 0) n.rstd[row] = scale;
}

/* Step 4: all loads first; the row stays in registers. Step 5, `weights_first`: the weights are loaded with the row.
 * Step 6: the kernel is launched early (mt_launch_early). */
template <bool weights_first> __global__ void registers(operands n) {
    int64_t row = blockIdx.x;
    const bf16 *x = n.x + row * CHANNELS;
    mt_pack<bf16, N> in[K], w[K];
    float sum[1] = {0};
    mt_begin_next();
    mt_wait_for_previous();
#pragma unroll
    for (int k = 0; k < K; k++) in[k] = mt_load<N>(x + (k * THREADS + threadIdx.x) * N);
    for (int k = 0; k < K && weights_first; k++) w[k] = mt_load<N>(n.w + (k * THREADS + threadIdx.x) * N);
    for (int k = 0; k < K; k++) sum[0] += squares_of(in[k]);
    mt_row_sum(sum, 0);
    float scale = rsqrtf(sum[0] / CHANNELS + EPS);
    for (int k = 0; k < K; k++) {
        int c = (k * THREADS + threadIdx.x) * N;
        mt_keep_packed(in[k]);
        if (!weights_first) w[k] = mt_load<N>(n.w + c);
        store_scaled(n.y + row * CHANNELS + c, in[k], scale, w[k]);
    }
    if (threadIdx.x == 0) n.rstd[row] = scale;
}

static mt_norm_args arguments_of(const operands *n) {
    mt_norm_args a = {};
    a.T = ROWS, a.H = 1, a.C = a.x_stride = a.y_stride = CHANNELS, a.eps = EPS;
    a.y = n->y, a.rstd = n->rstd, a.x = n->x, a.w = n->w;
    return a;
}

static const struct step {
    const char *name;
    void (*run)(const operands *n, mt_stream *stream);
} steps[] = {
    {"1 a thread for each row",
     [](const operands *n, mt_stream *s) { thread_for_a_row<<<ROWS / 64, 64, 0, mt_cuda_stream(s)>>>(*n); }},
    {"2 a block for each row",
     [](const operands *n, mt_stream *s) { block_for_a_row<<<ROWS, THREADS, 0, mt_cuda_stream(s)>>>(*n); }},
    {"3 packs of 16 bytes",
     [](const operands *n, mt_stream *s) { packs<<<ROWS, THREADS, 0, mt_cuda_stream(s)>>>(*n); }},
    {"4 the row in registers",
     [](const operands *n, mt_stream *s) { registers<false><<<ROWS, THREADS, 0, mt_cuda_stream(s)>>>(*n); }},
    {"5 the weights with the row",
     [](const operands *n, mt_stream *s) { registers<true><<<ROWS, THREADS, 0, mt_cuda_stream(s)>>>(*n); }},
    {"6 launched early",
     [](const operands *n, mt_stream *s) {
         mt_launch_early(registers<true>, ROWS, THREADS, 0, mt_cuda_stream(s), *n);
     }},
    {"cuda/norm.cu",
     [](const operands *n, mt_stream *s) {
         mt_norm_args a = arguments_of(n);
         mt_cuda_rmsnorm_forward(&a, MT_BF16, s);
     }},
};

/* Median seconds of run(set), for sets of operands in turn; together they exceed the cache. Three calls before the
 * timed ones keep the GPU at work while the host enqueues. */
template <class Run> static double measure(mt_stream *stream, Run run) {
    enum { BATCHES = 9, CALLS = 6, AHEAD = 3 };
    mt_event *from = mt_cuda_event_create(), *to = mt_cuda_event_create();
    std::vector<double> seconds;
    for (int batch = 0, set = 0; batch <= BATCHES; batch++) {
        for (int i = -AHEAD; i < CALLS; i++, set = (set + 1) % SETS) {
            if (i == 0) mt_cuda_event_record(from, stream);
            run(set);
        }
        mt_cuda_event_record(to, stream);
        double time = mt_cuda_event_seconds(from, to) / CALLS;
        if (batch > 0) seconds.push_back(time); // the first warms up
    }
    MT_CUDA_LAUNCHED();
    std::sort(seconds.begin(), seconds.end());
    return seconds[BATCHES / 2];
}

/* The largest difference between y of a step and the CPU's, relative to the CPU's. */
static double largest_error(const step *step, const operands *n, const std::vector<bf16> &expected, mt_stream *stream) {
    std::vector<bf16> y(COUNT);
    MT_CUDA(cudaMemsetAsync(n->y, 0xff, COUNT * 2, mt_cuda_stream(stream))); // NaN
    step->run(n, stream);
    MT_CUDA(cudaStreamSynchronize(mt_cuda_stream(stream)));
    MT_CUDA(cudaMemcpy(y.data(), n->y, COUNT * 2, cudaMemcpyDeviceToHost));
    double worst = 0;
    for (int64_t i = 0; i < COUNT; i++) {
        double a = __bfloat162float(y[i]), b = __bfloat162float(expected[i]), error = fabs(a - b) / (fabs(b) + 1e-6);
        if (!(error <= worst)) worst = error; // NaN too
        if (std::isnan(worst)) break;
    }
    return worst;
}

/* The CPU's y, from the GPU's x and w. */
static std::vector<bf16> expected_of(const operands *n) {
    std::vector<bf16> x(COUNT), y(COUNT), w(CHANNELS);
    std::vector<float> rstd(ROWS);
    MT_CUDA(cudaMemcpy(x.data(), n->x, COUNT * 2, cudaMemcpyDeviceToHost));
    MT_CUDA(cudaMemcpy(w.data(), n->w, CHANNELS * 2, cudaMemcpyDeviceToHost));
    const operands host = {y.data(), rstd.data(), x.data(), w.data()};
    mt_norm_args a = arguments_of(&host);
    mt_cpu_ops.rmsnorm_forward(&a, MT_BF16, NULL);
    return y;
}

/* A line of the table; all bytes are those of reading x and writing y. */
static void print_rate(const char *name, double seconds, double copy_rate, const char *remark) {
    double rate = 4.0 * COUNT / seconds;
    printf("%-28s %8.1f us %7.3f TB/s %6.1f%% of the copy rate%s\n", name, seconds * 1e6, rate * 1e-12,
           100 * rate / copy_rate, remark);
}

int main() {
    mt_error error;
    const mt_ops *ops = mt_cuda_open(0, &error);
    if (!ops) {
        printf("norm_ladder: skipped: %s\n", error.text);
        return 0;
    }
    mt_stream *s = ops->stream_create(NULL, 0, false);
    bf16 *x = (bf16 *)ops->memory_alloc(SETS * COUNT * 2), *y = (bf16 *)ops->memory_alloc(SETS * COUNT * 2);
    bf16 *w = (bf16 *)ops->memory_alloc(CHANNELS * 2);
    float *rstd = (float *)ops->memory_alloc(ROWS * 4);
    ops->random_normal(x, SETS * COUNT, 1, 0, 0, 1, MT_BF16, s);
    ops->random_normal(w, CHANNELS, 2, 0, 0, 1, MT_BF16, s);
    ops->stream_synchronize(s);
    operands sets[SETS];
    for (int i = 0; i < SETS; i++) sets[i] = {y + i * COUNT, rstd, x + i * COUNT, w};
    const std::vector<bf16> expected = expected_of(&sets[0]);
    auto copy = [&](int set, int64_t count) {
        MT_CUDA(cudaMemcpyAsync(sets[set].y, sets[set].x, count * 2, cudaMemcpyDeviceToDevice, mt_cuda_stream(s)));
    };
    double rate = 4.0 * SETS * COUNT / measure(s, [&](int) { copy(0, SETS * COUNT); });
    printf("%d x %d in bf16; a copy of %.1f GB moves %.2f TB/s\n", ROWS, CHANNELS, 2e-9 * SETS * COUNT, rate * 1e-12);
    bool correct = true;
    for (const step &step : steps) {
        bool agrees = largest_error(&step, &sets[0], expected, s) <= 1.0 / 128; // bf16 has 8 bits
        correct = correct && agrees;
        print_rate(step.name, measure(s, [&](int set) { step.run(&sets[set], s); }), rate, agrees ? "" : "  WRONG");
    }
    print_rate("a copy of as many bytes", measure(s, [&](int set) { copy(set, COUNT); }), rate, "");
    ops->stream_destroy(s);
    return correct ? 0 : 1;
}
