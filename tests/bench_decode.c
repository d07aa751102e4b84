/* bench_decode.c: the speed of generation relative to the limit of memory. A new token reads every weight once, so the
 * floor of its time is bytes of weights / read bandwidth. The model is llama2.c's 110M shape with random weights. On a
 * GPU the bandwidth is that of a large copy, and batches of texts, steps without CUDA graphs, and steps of separate
 * kernels where one kernel has all layers are measured too.
 *
 *   usage: bench_decode [TEXTS PROMPT NEW] [OPTIONS OF train, such as --bf16, --device cuda or another --hf-config]
 *
 * TEXTS, PROMPT and NEW: only so many texts at once with prompts and new tokens of this number, by three ways of
 * sampling. The limit then counts the keys and values that a step reads, too.
 */
#include "../data/tokens/prompts.h"
#include "../data/options/option_rules.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/models/generate.h"
#include "../data/checkpoint/run_options.h"

#include <stdlib.h>
#include <string.h>
#ifdef MT_HAVE_CUDA
#include "../cuda/decode.h"
#endif
#ifdef MT_HAVE_OPENMP
#include <omp.h>
#else
#pragma GCC diagnostic ignored "-Wunknown-pragmas" // one thread
#endif

enum { PROMPT = 4, NEW_TOKENS = 64, ROUNDS = 5, MAX_TEXTS = 64, MAX_ARGUMENTS = 64, MOST_PREFILL = 8192 };

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

/* A case: number and lengths of texts, and the way of sampling. */
typedef struct decode_case {
    int64_t texts, prompt, new_tokens; // texts at once, tokens of each prompt, and those generated
    int rounds;                        // the best is taken
    mt_sampling sampling;
    const char *rule; // of sampling
} decode_case;

/* Bytes that a step reads: all weights except an embedding table that is not tied to the output layer, and the keys and
 * values of texts of average length. */
static double bytes_per_step(const mt_run_options *o, const decode_case *c) {
    double weights = (double)mt_num_parameters(&o->stack), size = o->stack.bf16 ? 2 : 4;
    if (o->stack.untie_embeddings_and_output_weights)
        weights -= (double)o->stack.vocab_size * (double)o->stack.hidden_size;
    int64_t groups = o->group_query_attention ? o->stack.num_query_groups : o->stack.num_attention_heads;
    double tokens = (double)c->texts * ((double)c->prompt + (double)c->new_tokens / 2);
    return size * (weights + tokens * 2.0 * (double)(groups * o->stack.kv_channels * o->stack.num_layers));
}

/* Steps per second after the prompts, and seconds of the prompts. */
static double decode_rate(mt_generator *generator, const mt_run_options *options, const decode_case *c,
                          double *prefill) {
    mt_sequence *sequences = mt_malloc(c->texts * (int64_t)sizeof *sequences);
    int32_t *prompt = mt_malloc(c->prompt * 4);
    double best = 0;
    mt_error error;
    for (int round = 0; round < c->rounds; round++) {
        for (int64_t s = 0; s < c->texts; s++) {
            for (int64_t i = 0; i < c->prompt; i++) // no two texts share a page, nor do a warm-up's
                prompt[i] = (int32_t)(((s + 1) * 7919 + i * 104729 + c->new_tokens * 31) % options->stack.vocab_size);
            if (mt_sequence_begin(&sequences[s], s, prompt, c->prompt, c->prompt + c->new_tokens,
                                  options->max_new_tokens, &options->stack, &error) != 0)
                mt_die("%s", error.text);
        }
        mt_generator_totals before = mt_generator_read_totals(generator);
        int64_t unfinished;
        do unfinished = mt_generator_step(generator, sequences, c->texts, &error);
        while (unfinished > 0);
        if (unfinished < 0) mt_die("%s", error.text);
        mt_generator_totals after = mt_generator_read_totals(generator);
        double tokens = (double)(after.decode_tokens - before.decode_tokens);
        double rate = tokens / (double)c->texts / (after.decode_seconds - before.decode_seconds);
        if (rate > best) best = rate;
        *prefill = after.prefill_seconds - before.prefill_seconds;
        for (int64_t s = 0; s < c->texts; s++) mt_sequence_end(&sequences[s]);
    }
    free(sequences);
    free(prompt);
    return best;
}

/* Graphs that were captured with one kernel for the layers of a step. */
static int64_t num_fused(void) {
#ifdef MT_HAVE_CUDA
    return mt_cuda_decode_fused();
#else
    return 0;
#endif
}

/* Measures and prints the speed of a case. */
static void bench(const mt_run_options *options, const mt_ops *ops, const decode_case *c, double bandwidth) {
    const mt_grid grid = mt_grid_of_one;
    const mt_stops stops = {.count = 0};
    mt_model_plan plan = mt_generator_plan(c->texts, c->prompt + c->new_tokens, c->prompt * c->texts);
    mt_model *model;
    mt_error error;
    mt_run_options sized = *options;
    // All prompts are read in few forwards, so that the texts have about the same length from then on.
    if (c->prompt > PROMPT) plan.max_tokens = mt_min(c->prompt * c->texts, MOST_PREFILL);
    sized.max_new_tokens = c->new_tokens;
    bool on_cpu = ops == &mt_cpu_ops;
    int64_t fused = num_fused();
    if (mt_model_create(&model, &sized.stack, &grid, ops, &plan, &error) != 0) mt_die("%s", error.text);
    mt_model_init(model);
    mt_generator *generator = mt_generator_create(model, &c->sampling, &stops);
    if (on_cpu) bandwidth = read_bandwidth();
    double prefill;
    decode_case warm_up = *c; // algorithms are chosen, kernels loaded
    warm_up.new_tokens = 4, warm_up.rounds = 1;
    decode_rate(generator, &sized, &warm_up, &prefill);
    double rate = decode_rate(generator, &sized, c, &prefill), bytes = bytes_per_step(options, c);
    double again = on_cpu ? read_bandwidth() : 0;
    if (again > bandwidth) bandwidth = again;
    printf("decode %lld at once, %lld + %lld tokens, %s, %.0fM parameters, %s, ", (long long)c->texts,
           (long long)c->prompt, (long long)c->new_tokens, c->rule, (double)mt_num_parameters(&options->stack) / 1e6,
           options->stack.bf16 ? "bf16" : "fp32");
    if (on_cpu)
        printf("%d threads", num_threads());
    else
        printf("%s", !ops->graph_begin     ? "GPU without graphs"
                     : num_fused() > fused ? "GPU with one kernel"
                                           : "GPU with graphs");
    printf(": %.1f tokens/s, %.3f ms per step; limit: %.0f MB per step at %.1f GB/s, %.1f tokens/s; reached %.0f%%; "
           "prompts %.0f tokens/s\n",
           rate * (double)c->texts, 1e3 / rate, bytes / 1e6, bandwidth / 1e9, bandwidth / bytes * (double)c->texts,
           100 * rate * bytes / bandwidth, (double)(c->texts * c->prompt) / prefill);
    fflush(stdout);
    mt_generator_destroy(generator);
    mt_model_destroy(model);
}

/* On a GPU, a case with separate kernels in the graph where it has one kernel otherwise. */
static void bench_separate(const mt_run_options *options, const mt_ops *ops, const decode_case *c, double bandwidth) {
#ifdef MT_HAVE_CUDA
    if (ops == &mt_cpu_ops || c->texts > MT_DECODE_ROWS) return;
    mt_cuda_decode_fuse(false);
    bench(options, ops, c, bandwidth);
    mt_cuda_decode_fuse(true);
#else
    (void)options, (void)ops, (void)c, (void)bandwidth;
#endif
}

/* One case by each way of sampling. */
static void bench_samplings(const mt_run_options *options, const mt_ops *ops, decode_case c, double bandwidth) {
    const decode_case ways[] = {
        {.rule = "greedy", .sampling = {.top_p = 1}},
        {.rule = "temperature 1", .sampling = {.temperature = 1, .top_p = 1, .logprobs = true}},
        {.rule = "top-k 50, top-p 0.95", .sampling = {.temperature = 1, .top_k = 50, .top_p = 0.95, .logprobs = true}}};
    for (int i = 0; i < 3; i++) {
        c.rule = ways[i].rule, c.sampling = ways[i].sampling;
        if (i == 0) bench_separate(options, ops, &c, bandwidth);
        bench(options, ops, &c, bandwidth);
    }
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
    int count = 16, first = 1;
    decode_case one = {.texts = 1, .prompt = PROMPT, .new_tokens = NEW_TOKENS, .rounds = ROUNDS, .rule = "greedy"};
    one.sampling.top_p = 1;
    if (argc > 3 && argv[1][0] != '-') {
        one.texts = atoll(argv[1]), one.prompt = atoll(argv[2]), one.new_tokens = atoll(argv[3]), one.rounds = 1;
        if (one.texts < 1 || one.prompt < 1 || one.new_tokens < 2) mt_die("TEXTS PROMPT NEW: numbers above 0, 0 and 1");
        first = 4;
    }
    for (int i = first; i < argc && count < MAX_ARGUMENTS; i++) arguments[count++] = argv[i];
    mt_run_options options;
    mt_error error;
    if (mt_options_parse(&options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0 ||
        mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error) != 0)
        mt_die("%s", error.text);
    mt_grid grid = mt_grid_of_one;
    const mt_ops *ops = mt_backend_open(options.device, &grid, &error);
    if (!ops) mt_die("%s", error.text);
    double bandwidth = ops == &mt_cpu_ops ? 0 : copy_bandwidth(ops);
    if (first > 1) {
        bench_samplings(&options, ops, one, bandwidth);
    } else if (ops == &mt_cpu_ops) {
        bench(&options, ops, &one, 0);
    } else {
        mt_ops plain = *ops;
        plain.graph_begin = NULL;
        bench(&options, &plain, &one, bandwidth);
        for (one.texts = 1; one.texts <= MAX_TEXTS; one.texts *= 2) {
            bench_separate(&options, ops, &one, bandwidth);
            bench(&options, ops, &one, bandwidth);
        }
    }
    mt_options_free(&options);
    return 0;
}
