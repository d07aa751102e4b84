/* How fast one text is generated, against what the memory allows: a new token needs every weight once, so bytes of
 * weights over the read bandwidth is a floor of its time. The shape is llama2.c's 110M model, with random weights.
 *
 *   usage: bench_decode [OPTIONS OF train, such as --bf16 or another --hf-config]
 */
#include "../megatron.h"

#include <stdlib.h>
#include <string.h>
#ifdef MT_HAVE_OPENMP
#include <omp.h>
#else
#pragma GCC diagnostic ignored "-Wunknown-pragmas" // one thread then does it all
#endif

enum { PROMPT = 4, NEW_TOKENS = 64, ROUNDS = 5, MAX_ARGUMENTS = 64 };

static int num_threads(void) {
#ifdef MT_HAVE_OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

/* Bytes a second at which all threads together read a buffer that no cache holds: the best of some rounds. */
static double read_bandwidth(void) {
    const int64_t count = (int64_t)1 << 27, lanes = 64; // 512 MiB; 64 sums that do not wait for one another
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
    if (total == 0) mt_die("nothing was read");
    free(buffer);
    return best;
}

/* Bytes of the weights that a new token needs: all but an embedding table that is not the output layer's too. */
static double bytes_per_token(const mt_options *o) {
    double weights = (double)mt_num_parameters(o);
    if (o->untie_embeddings_and_output_weights) weights -= (double)o->vocab_size * (double)o->hidden_size;
    return weights * (o->bf16 ? 2 : 4);
}

/* Tokens a second after the prompt: the best of some rounds. */
static double decode_rate(mt_generator *generator, const mt_options *options) {
    const int32_t prompt[PROMPT] = {1, 9, 5, 7};
    double best = 0;
    mt_error error;
    for (int round = 0; round < ROUNDS; round++) {
        mt_sequence sequence;
        if (mt_sequence_begin(&sequence, round, prompt, PROMPT, PROMPT + NEW_TOKENS, options, &error) != 0 ||
            mt_generator_step(generator, &sequence, 1, &error) < 0)
            mt_die("%s", error.text);
        double start = mt_time();
        while (!sequence.finished)
            if (mt_generator_step(generator, &sequence, 1, &error) < 0) mt_die("%s", error.text);
        double rate = (NEW_TOKENS - 1) / (mt_time() - start);
        if (rate > best) best = rate;
        free(sequence.tokens);
    }
    return best;
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
                                      "64"};
    int count = 14;
    for (int i = 1; i < argc && count < MAX_ARGUMENTS; i++) arguments[count++] = argv[i];
    mt_options options;
    mt_error error;
    if (mt_options_parse(&options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0 ||
        mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error) != 0)
        mt_die("%s", error.text);
    options.max_new_tokens = NEW_TOKENS;
    const mt_grid grid = MT_GRID_OF_ONE;
    const mt_sampling greedy = {.temperature = 0, .top_p = 1};
    const mt_stops stops = {.count = 0};
    mt_model_plan plan = mt_generator_plan(1, PROMPT + NEW_TOKENS, PROMPT);
    mt_model *model;
    if (mt_model_create(&model, &options, &grid, &mt_cpu_ops, &plan, &error) != 0) mt_die("%s", error.text);
    mt_model_init(model);
    mt_generator *generator = mt_generator_create(model, 1, &greedy, &stops);

    double bandwidth = read_bandwidth(), rate = decode_rate(generator, &options);
    double again = read_bandwidth(), bytes = bytes_per_token(&options);
    if (again > bandwidth) bandwidth = again;
    printf("decode, %.0fM parameters, %s, %d threads: %.1f tokens/s; reading %.0f MB a token at %.1f GB/s would give "
           "%.1f, so %.0f%% (goal: 70%%)\n",
           (double)mt_num_parameters(&options) / 1e6, options.bf16 ? "bf16" : "fp32", num_threads(), rate, bytes / 1e6,
           bandwidth / 1e9, bandwidth / bytes, 100 * rate * bytes / bandwidth);
    mt_generator_destroy(generator);
    mt_model_destroy(model);
    mt_options_free(&options);
    return 0;
}
