/* bench_decode.c: the speed of generation relative to the limit of memory. A new token reads every weight once, so the
 * floor of its time is bytes of weights / read bandwidth. The model is llama2.c's 110M shape with random weights. On a
 * GPU the bandwidth is that of a large copy, and batches of texts and steps without CUDA graphs are measured too.
 *
 *   usage: bench_decode [OPTIONS OF train, such as --bf16, --device cuda or another --hf-config]
 */
#include "../data/options.h"
#include "../data/prompts.h"
#include "../data/rollout.h"

#include <stdlib.h>
#include <string.h>
#ifdef MT_HAVE_OPENMP
#include <omp.h>
#else
#pragma GCC diagnostic ignored "-Wunknown-pragmas" // one thread
#endif

enum { PROMPT = 4, NEW_TOKENS = 64, ROUNDS = 5, MAX_TEXTS = 64, MAX_ARGUMENTS = 64 };

static int num_threads(void) {
#ifdef MT_HAVE_OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

/* Read bandwidth (bytes per second) of all threads on a buffer larger than the caches; the best of ROUNDS. */
static double read_bandwidth(void) {
    const int64_t count = (int64_t)1 << 27, lanes = 64; // 512 MiB; 64 independent sums
    float *buffer = mt_malloc(count * 4), total = 0;
    double best = 0;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i++) buffer[i] = 1;
    for (int round = 0; round < ROUNDS; round++) {
        double start = mt_time();
#pragma omp parallel for schedule(static) reduction(+ : total)
        for (int64_t block = 0; block < count / 4096; block++) {
            float sums[64] = {0};
            for (int64_t i = 0; i < 4096; i += lanes)
                for (int64_t j = 0; j < lanes; j++) sums[j] += buffer[block * 4096 + i + j];
            for (int64_t j = 0; j < lanes; j++) total += sums[j];
        }
        double rate = (double)count * 4 / (mt_time() - start);
        if (rate > best) best = rate;
    }
    if (total == 0) mt_die("the sum of the buffer is zero");
    free(buffer);
    return best;
}

/* Bandwidth (bytes read and written per second) of a large copy on a GPU. */
static double copy_bandwidth(const mt_ops *ops) {
    const int64_t bytes = (int64_t)1 << 30, calls = 8;
    char *memory = ops->memory_alloc(2 * bytes);
    mt_stream *stream = ops->stream_create(NULL, 0, true);
    double best = 0;
    for (int round = 0; round < ROUNDS; round++) {
        double start = mt_time();
        for (int64_t i = 0; i < calls; i++) ops->memory_copy(memory, memory + bytes, bytes, stream);
        ops->stream_synchronize(stream);
        double rate = 2.0 * (double)(bytes * calls) / (mt_time() - start);
        if (rate > best) best = rate;
    }
    ops->stream_destroy(stream);
    ops->memory_free(memory);
    return best;
}

/* Bytes of the weights that a step reads: all except an embedding table that is not tied to the output layer. */
static double bytes_per_step(const mt_options *o) {
    double weights = (double)mt_num_parameters(o);
    if (o->untie_embeddings_and_output_weights) weights -= (double)o->vocab_size * (double)o->hidden_size;
    return weights * (o->bf16 ? 2 : 4);
}

/* Steps per second after the prompts; the best of ROUNDS. */
static double decode_rate(mt_generator *generator, const mt_options *options, int64_t texts) {
    const int32_t prompt[PROMPT] = {1, 9, 5, 7};
    mt_sequence sequences[MAX_TEXTS];
    double best = 0;
    mt_error error;
    for (int round = 0; round < ROUNDS; round++) {
        for (int64_t s = 0; s < texts; s++)
            if (mt_sequence_begin(&sequences[s], s, prompt, PROMPT, PROMPT + NEW_TOKENS, options, &error) != 0)
                mt_die("%s", error.text);
        int64_t unfinished = mt_generator_step(generator, sequences, texts, &error);
        double start = mt_time();
        while (unfinished > 0) unfinished = mt_generator_step(generator, sequences, texts, &error);
        if (unfinished < 0) mt_die("%s", error.text);
        double rate = (NEW_TOKENS - 1) / (mt_time() - start);
        if (rate > best) best = rate;
        for (int64_t s = 0; s < texts; s++) mt_sequence_end(&sequences[s]);
    }
    return best;
}

/* Measures and prints the speed with `texts` texts at once. */
static void bench(const mt_options *options, const mt_ops *ops, int64_t texts, double bandwidth) {
    const mt_grid grid = mt_grid_of_one;
    const mt_sampling greedy = {.temperature = 0, .top_p = 1};
    const mt_stops stops = {.count = 0};
    mt_model_plan plan = mt_generator_plan(texts, PROMPT + NEW_TOKENS, PROMPT * texts);
    mt_model *model;
    mt_error error;
    bool on_cpu = ops == &mt_cpu_ops;
    if (mt_model_create(&model, options, &grid, ops, &plan, &error) != 0) mt_die("%s", error.text);
    mt_model_init(model);
    mt_generator *generator = mt_generator_create(model, &greedy, &stops);
    if (on_cpu) bandwidth = read_bandwidth();
    double rate = decode_rate(generator, options, texts), bytes = bytes_per_step(options);
    double again = on_cpu ? read_bandwidth() : 0;
    if (again > bandwidth) bandwidth = again;
    printf("decode %lld at once, %.0fM parameters, %s, ", (long long)texts, (double)mt_num_parameters(options) / 1e6,
           options->bf16 ? "bf16" : "fp32");
    if (on_cpu)
        printf("%d threads", num_threads());
    else
        printf("%s", ops->graph_begin ? "GPU with graphs" : "GPU without graphs");
    printf(": %.1f tokens/s, %.3f ms per step; limit: %.0f MB per step at %.1f GB/s, %.1f tokens/s; reached %.0f%%\n",
           rate * (double)texts, 1e3 / rate, bytes / 1e6, bandwidth / 1e9, bandwidth / bytes * (double)texts,
           100 * rate * bytes / bandwidth);
    fflush(stdout);
    mt_generator_destroy(generator);
    mt_model_destroy(model);
}

int main(int argc, char **argv) {
    char *arguments[MAX_ARGUMENTS] = {"train",
                                      "--hf-config",
                                      "data/configs/llama2c-110m.json",
                                      "--mock-data",
                                      "--train-iters",
                                      "1",
                                      "--lr",
                                      "1e-3",
                                      "--micro-batch-size",
                                      "1",
                                      "--global-batch-size",
                                      "1",
                                      "--seq-length",
                                      "64",
                                      "--device",
                                      "cpu"};
    int count = 16;
    for (int i = 1; i < argc && count < MAX_ARGUMENTS; i++) arguments[count++] = argv[i];
    mt_options options;
    mt_error error;
    if (mt_options_parse(&options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0 ||
        mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error) != 0)
        mt_die("%s", error.text);
    options.max_new_tokens = NEW_TOKENS;
    mt_grid grid = mt_grid_of_one;
    const mt_ops *ops = mt_backend_open(options.device, &grid, &error);
    if (!ops) mt_die("%s", error.text);
    if (ops == &mt_cpu_ops) {
        bench(&options, ops, 1, 0);
    } else {
        double bandwidth = copy_bandwidth(ops);
        mt_ops plain = *ops;
        plain.graph_begin = NULL;
        bench(&options, &plain, 1, bandwidth);
        for (int64_t texts = 1; texts <= MAX_TEXTS; texts *= 2) bench(&options, ops, texts, bandwidth);
    }
    mt_options_free(&options);
    return 0;
}
