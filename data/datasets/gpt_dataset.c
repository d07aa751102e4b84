/* gpt_dataset.c: samples of documents in the order of Megatron-LM, id for id; blends.
 *
 * Shuffle the documents of all epochs and concatenate them; cut this stream into samples of seq_length + 1 tokens that
 * overlap by one token (the last label); shuffle the samples. Sample s of the stream begins at token s * seq_length, so
 * a table of the first token of each document is enough to find it.
 */
#include "gpt_dataset.h"

#include "../base/file.h"
#include "dataset.h"
#include "indexed_dataset.h"
#include "random_order.h"
#include "t5_dataset.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- datasets --------------------------------------------------------------------------------------------------- */

int mt_dataset_get(const mt_dataset *dataset, int64_t index, int32_t *tokens, mt_error *error) {
    MT_CHECK(index >= 0 && index < dataset->num_samples);
    return dataset->get(dataset, index, tokens, error);
}

void mt_dataset_free(mt_dataset *dataset) {
    if (dataset) dataset->free(dataset);
}

/* ---- one dataset ------------------------------------------------------------------------------------------------- */

typedef struct gpt_dataset {
    mt_dataset base;
    const mt_indexed_dataset *indexed;
    int64_t vocab_size;
    int64_t num_documents;    // over all epochs
    uint32_t *document_index; // [num_documents] sequence of the indexed dataset
    int64_t *document_start;  // [num_documents + 1] position of its first token in the stream
    uint32_t *shuffle_index;  // [num_samples] sample of the stream
} gpt_dataset;

/* The number of epochs; the last epoch may be shuffled separately. */
typedef struct epoch_plan {
    int64_t tokens_per_epoch, num_epochs;
    int64_t num_samples;          // in all epochs
    int64_t samples_before_final; // num_samples unless the final epoch is separate
} epoch_plan;

/* The final epoch is shuffled separately if under 80% of it is used; the unused samples then all belong to it. */
static epoch_plan plan_epochs(int64_t tokens_per_epoch, int64_t wanted, int64_t seq_length) {
    epoch_plan plan = {.tokens_per_epoch = tokens_per_epoch, .num_epochs = 1};
    if (wanted >= 0) plan.num_epochs = (wanted * seq_length + 1 + tokens_per_epoch - 1) / tokens_per_epoch;
    plan.num_samples = (plan.num_epochs * tokens_per_epoch - 1) / seq_length;
    plan.samples_before_final = plan.num_samples;
    if (plan.num_epochs == 1) return plan;
    int64_t before_final = ((plan.num_epochs - 1) * tokens_per_epoch - 1) / seq_length;
    int64_t samples_per_epoch = (tokens_per_epoch - 1) / seq_length;
    if (wanted - before_final < (int64_t)(0.80 * (double)samples_per_epoch)) plan.samples_before_final = before_final;
    return plan;
}

static void build_document_index(gpt_dataset *dataset, mt_mt19937 *random, const epoch_plan *plan, int64_t begin,
                                 int64_t end) {
    int64_t per_epoch = end - begin;
    dataset->num_documents = plan->num_epochs * per_epoch;
    uint32_t *index = mt_malloc(dataset->num_documents * (int64_t)sizeof *index);
    for (int64_t i = 0; i < dataset->num_documents; i++) index[i] = (uint32_t)(begin + i % per_epoch);
    bool separate_final = plan->samples_before_final < plan->num_samples;
    int64_t before_final = dataset->num_documents - (separate_final ? per_epoch : 0);
    mt_numpy_shuffle(random, index, before_final);
    mt_numpy_shuffle(random, index + before_final, dataset->num_documents - before_final);
    dataset->document_index = index;
}

static void build_document_start(gpt_dataset *dataset) {
    int64_t *start = mt_malloc((dataset->num_documents + 1) * (int64_t)sizeof *start);
    start[0] = 0;
    for (int64_t i = 0; i < dataset->num_documents; i++)
        start[i + 1] = start[i] + mt_indexed_dataset_length(dataset->indexed, dataset->document_index[i]);
    dataset->document_start = start;
}

static void build_shuffle_index(gpt_dataset *dataset, mt_mt19937 *random, const epoch_plan *plan) {
    uint32_t *index = mt_malloc(plan->num_samples * (int64_t)sizeof *index);
    for (int64_t i = 0; i < plan->num_samples; i++) index[i] = (uint32_t)i;
    mt_numpy_shuffle(random, index, plan->samples_before_final);
    mt_numpy_shuffle(random, index + plan->samples_before_final, plan->num_samples - plan->samples_before_final);
    dataset->shuffle_index = index;
}

/* The document with token `position` of the stream: the last that begins at or before it, which is not empty. */
static int64_t find_document(const gpt_dataset *dataset, int64_t position) {
    int64_t low = 0, high = dataset->num_documents;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (dataset->document_start[middle] <= position)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static int gpt_dataset_get(const mt_dataset *base, int64_t index, int32_t *tokens, mt_error *error) {
    const gpt_dataset *dataset = (const gpt_dataset *)base;
    int64_t position = dataset->shuffle_index[index] * base->seq_length, end = position + base->seq_length + 1;
    if (mt_indexed_dataset_check(dataset->indexed, error) != 0) return -1;
    for (int64_t d = find_document(dataset, position); position < end; d++) {
        int64_t offset = position - dataset->document_start[d];
        int64_t count = dataset->document_start[d + 1] - position;
        if (count > end - position) count = end - position;
        if (mt_indexed_dataset_get(dataset->indexed, dataset->document_index[d], offset, count, dataset->vocab_size,
                                   tokens, error) != 0)
            return -1;
        tokens += count;
        position += count;
    }
    return 0;
}

static void gpt_dataset_free(mt_dataset *base) {
    gpt_dataset *dataset = (gpt_dataset *)base;
    free(dataset->document_index);
    free(dataset->document_start);
    free(dataset->shuffle_index);
    free(dataset);
}

/* Makes the plan. Errors: no tokens; more samples than 32 bits can number. */
static int check_plan(epoch_plan *plan, const mt_indexed_dataset *indexed, int64_t begin, int64_t end,
                      int64_t num_samples, int64_t seq_length, mt_error *error) {
    const char *prefix = mt_indexed_dataset_prefix(indexed);
    int64_t tokens = 0;
    for (int64_t i = begin; i < end; i++) tokens += mt_indexed_dataset_length(indexed, i);
    if (tokens == 0)
        return mt_error_set(error,
                            "%s: documents %lld to %lld hold no tokens; choose another --split or give more data",
                            prefix, (long long)begin, (long long)end);
    if (num_samples > UINT32_MAX - 1 || seq_length > INT32_MAX / 2 || end > INT32_MAX || tokens > INT64_MAX / 4)
        return mt_error_set(error, "%s: %lld samples of %lld tokens are too many to number; train on fewer", prefix,
                            (long long)num_samples, (long long)seq_length);
    *plan = plan_epochs(tokens, num_samples, seq_length);
    if (plan->num_samples < 1 || plan->num_samples > UINT32_MAX - 1)
        return mt_error_set(error, "%s: documents %lld to %lld hold %lld tokens, which make %lld samples of %lld; %s",
                            prefix, (long long)begin, (long long)end, (long long)tokens, (long long)plan->num_samples,
                            (long long)seq_length + 1,
                            plan->num_samples < 1 ? "give more data or a shorter --seq-length" : "give less data");
    return 0;
}

int mt_gpt_dataset_create(mt_dataset **out, const mt_indexed_dataset *indexed, int64_t begin, int64_t end,
                          int64_t num_samples, const mt_data_config *config, mt_error *error) {
    *out = NULL;
    epoch_plan plan = {0};
    if (check_plan(&plan, indexed, begin, end, num_samples, config->seq_length, error) != 0) return -1;
    gpt_dataset *dataset = mt_calloc(sizeof *dataset);
    dataset->base = (mt_dataset){.num_samples = plan.num_samples,
                                 .seq_length = config->seq_length,
                                 .get = gpt_dataset_get,
                                 .free = gpt_dataset_free,
                                 .num_documents = end - begin,
                                 .num_tokens = plan.tokens_per_epoch};
    dataset->indexed = indexed;
    dataset->vocab_size = config->vocab_size;
    mt_mt19937 random; // documents and samples draw from one stream, in this order
    mt_mt19937_seed(&random, (uint32_t)config->seed);
    build_document_index(dataset, &random, &plan, begin, end);
    build_document_start(dataset);
    build_shuffle_index(dataset, &random, &plan);
    *out = &dataset->base;
    return 0;
}

/* ---- a run that was extended ------------------------------------------------------------------------------------ */

/* Datasets of the same documents, one after another. */
typedef struct extended_dataset {
    mt_dataset base;
    int64_t count;
    mt_dataset *parts[MT_MAX_DATA_PLANS];
} extended_dataset;

static int extended_dataset_get(const mt_dataset *base, int64_t index, int32_t *tokens, mt_error *error) {
    const extended_dataset *dataset = (const extended_dataset *)base;
    int64_t part = 0;
    for (; index >= dataset->parts[part]->num_samples; part++) index -= dataset->parts[part]->num_samples;
    return mt_dataset_get(dataset->parts[part], index, tokens, error);
}

static void extended_dataset_free(mt_dataset *base) {
    extended_dataset *dataset = (extended_dataset *)base;
    for (int64_t i = 0; i < dataset->count; i++) mt_dataset_free(dataset->parts[i]);
    free(dataset);
}

int mt_indexed_dataset_extend(mt_dataset **out, const mt_indexed_dataset *indexed, int64_t begin, int64_t end,
                              const int64_t *sizes, int64_t count, const mt_data_config *config, mt_error *error) {
    MT_CHECK(count >= 1 && count <= MT_MAX_DATA_PLANS);
    int (*create)(mt_dataset **, const mt_indexed_dataset *, int64_t, int64_t, int64_t, const mt_data_config *,
                  mt_error *) = config->spans ? mt_t5_dataset_create : mt_gpt_dataset_create;
    mt_dataset *first;
    *out = NULL;
    if (create(&first, indexed, begin, end, sizes[0], config, error) != 0) return -1;
    if (sizes[count - 1] <= first->num_samples) {
        *out = first;
        return 0;
    }
    extended_dataset *dataset = mt_calloc(sizeof *dataset);
    dataset->base = *first;
    dataset->base.get = extended_dataset_get;
    dataset->base.free = extended_dataset_free;
    dataset->parts[dataset->count++] = first;
    for (int64_t i = 1; i < count; i++) {
        int64_t missing = sizes[i] - dataset->base.num_samples;
        if (missing <= 0) continue;
        mt_data_config own = *config;
        own.seed = (int64_t)(mt_random_key((uint64_t)config->seed, UINT64_C(0x657874656e64), (uint64_t)i) & UINT32_MAX);
        mt_dataset **part = &dataset->parts[dataset->count];
        if (create(part, indexed, begin, end, missing, &own, error) != 0) {
            extended_dataset_free(&dataset->base);
            return -1;
        }
        dataset->base.num_samples += (*part)->num_samples;
        dataset->count++;
    }
    *out = &dataset->base;
    return 0;
}

const char *mt_gpt_dataset_prefix(const mt_dataset *base) {
    if (base->get == extended_dataset_get) base = ((const extended_dataset *)base)->parts[0];
    if (base->get != gpt_dataset_get) return mt_t5_dataset_prefix(base);
    return mt_indexed_dataset_prefix(((const gpt_dataset *)base)->indexed);
}

int64_t mt_dataset_epoch(const mt_dataset *base) {
    if (base->get == extended_dataset_get) base = ((const extended_dataset *)base)->parts[0];
    int64_t of_spans = mt_t5_dataset_epoch(base);
    return of_spans > 0 ? of_spans : (base->num_tokens - 1) / base->seq_length;
}

/* ---- blends ------------------------------------------------------------------------------------------------------ */

typedef struct blended_dataset {
    mt_dataset base;
    int64_t num_sources;
    mt_dataset **sources;
    int16_t *source;        // [num_samples]
    uint32_t *source_index; // [num_samples]
} blended_dataset;

/* NumPy's pairwise sum: its order of additions, so that weights and thus blends are the same. */
static double numpy_sum(const double *x, int64_t n) {
    if (n > 128) {
        int64_t half = n / 2 - n / 2 % 8;
        return numpy_sum(x, half) + numpy_sum(x + half, n - half);
    }
    double sum = 0, lanes[8];
    int64_t i = 0;
    if (n >= 8) {
        memcpy(lanes, x, sizeof lanes);
        for (i = 8; i + 8 <= n; i += 8)
            for (int lane = 0; lane < 8; lane++) lanes[lane] += x[i + lane];
        sum = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
    }
    for (; i < n; i++) sum += x[i];
    return sum;
}

void mt_weights_normalize(double *normalized, const double *weights, int64_t count) {
    double sum = numpy_sum(weights, count);
    for (int64_t i = 0; i < count; i++) normalized[i] = weights[i] / sum;
}

int64_t mt_blend_target(double weight, int64_t size) {
    return (int64_t)ceil((double)size * weight);
}

int64_t mt_blend_surplus(int64_t target) {
    return (int64_t)ceil((double)target * (1 + 0.005));
}

/* The share of a source minus the samples taken. `volatile` rounds the product before the difference: a fused
 * multiply-add would break ties unlike Megatron. */
static double shortfall(double weight, double count, int64_t taken) {
    volatile double share = weight * count;
    return share - (double)taken;
}

/* Every sample comes from the source with the largest shortfall, the first of equals. */
static int build_blend(blended_dataset *blend, const double *weights, mt_error *error) {
    int64_t *taken = mt_calloc(blend->num_sources * (int64_t)sizeof *taken);
    int result = 0;
    for (int64_t i = 0; i < blend->base.num_samples && result == 0; i++) {
        double count = i > 1 ? (double)i : 1;
        int64_t next = 0;
        double largest = shortfall(weights[0], count, taken[0]);
        for (int64_t s = 1; s < blend->num_sources; s++) {
            double missing = shortfall(weights[s], count, taken[s]);
            if (missing > largest) {
                largest = missing;
                next = s;
            }
        }
        blend->source[i] = (int16_t)next;
        blend->source_index[i] = (uint32_t)taken[next]++;
        if (taken[next] > blend->sources[next]->num_samples)
            result = mt_error_set(error,
                                  "the blend needs more than the %lld samples of its data path %lld; give a weight "
                                  "before every path, to read paths more than once, or train on fewer samples",
                                  (long long)blend->sources[next]->num_samples, (long long)next + 1);
    }
    free(taken);
    return result;
}

static int blended_dataset_get(const mt_dataset *base, int64_t index, int32_t *tokens, mt_error *error) {
    const blended_dataset *blend = (const blended_dataset *)base;
    return mt_dataset_get(blend->sources[blend->source[index]], blend->source_index[index], tokens, error);
}

static void blended_dataset_free(mt_dataset *base) {
    blended_dataset *blend = (blended_dataset *)base;
    for (int64_t s = 0; s < blend->num_sources; s++) mt_dataset_free(blend->sources[s]);
    free(blend->sources);
    free(blend->source);
    free(blend->source_index);
    free(blend);
}

int mt_blended_dataset_create(mt_dataset **out, mt_dataset *const *sources, const double *weights, int64_t num_sources,
                              int64_t size, mt_error *error) {
    MT_CHECK(num_sources > 0 && num_sources < INT16_MAX && size >= 0 && size < UINT32_MAX);
    blended_dataset *blend = mt_calloc(sizeof *blend);
    blend->base = (mt_dataset){.num_samples = size,
                               .seq_length = sources[0]->seq_length,
                               .get = blended_dataset_get,
                               .free = blended_dataset_free};
    for (int64_t s = 0; s < num_sources; s++) {
        blend->base.num_documents += sources[s]->num_documents;
        blend->base.num_tokens += sources[s]->num_tokens;
    }
    blend->num_sources = num_sources;
    blend->sources = mt_malloc(num_sources * (int64_t)sizeof *blend->sources);
    memcpy(blend->sources, sources, (size_t)num_sources * sizeof *blend->sources);
    blend->source = mt_malloc(size * (int64_t)sizeof *blend->source);
    blend->source_index = mt_malloc(size * (int64_t)sizeof *blend->source_index);
    double *normalized = mt_malloc(num_sources * (int64_t)sizeof *normalized);
    mt_weights_normalize(normalized, weights, num_sources);
    int result = build_blend(blend, normalized, error);
    free(normalized);
    if (result != 0) blended_dataset_free(&blend->base);
    *out = result == 0 ? &blend->base : NULL;
    return result;
}

void mt_blended_dataset_locate(const mt_dataset *base, int64_t index, int64_t *source, int64_t *source_index) {
    const blended_dataset *blend = (const blended_dataset *)base;
    MT_CHECK(base->get == blended_dataset_get && index >= 0 && index < base->num_samples);
    *source = blend->source[index];
    *source_index = blend->source_index[index];
}

int64_t mt_blended_dataset_sources(const mt_dataset *base, mt_dataset *const **sources) {
    const blended_dataset *blend = (const blended_dataset *)base;
    if (base->get != blended_dataset_get) return 0;
    *sources = blend->sources;
    return blend->num_sources;
}

/* ---- parsing --split and --data-path ----------------------------------------------------------------------------- */

int mt_split_parse(double edges[MT_NUM_SPLITS + 1], const char *split, mt_error *error) {
    double shares[MT_NUM_SPLITS] = {0};
    int64_t count = 0;
    bool good = true;
    for (const char *text = split; good && *text;) {
        char *end;
        good = count < MT_NUM_SPLITS && ((*text >= '0' && *text <= '9') || *text == '.');
        if (!good) break;
        shares[count++] = strtod(text, &end);
        text = end + strspn(end, ",/ ");
        good = text != end || *end == '\0';
    }
    double sum = numpy_sum(shares, MT_NUM_SPLITS);
    if (!good || !(sum > 0) || !isfinite(sum))
        return mt_error_set(error, "--split %s: give up to three shares (training, validation, test), such as 969,30,1",
                            split);
    edges[0] = 0;
    for (int i = 0; i < MT_NUM_SPLITS; i++) edges[i + 1] = edges[i] + shares[i] / sum;
    return 0;
}

static bool parse_weight(double *weight, const char *word) {
    char *end;
    errno = 0;
    *weight = strtod(word, &end);
    return end != word && *end == '\0';
}

void mt_blend_free(mt_blend *blend) {
    free(blend->paths);
    free(blend->weights);
    *blend = (mt_blend){0};
}

static int check_weights(const mt_blend *blend, const char *option, mt_error *error) {
    for (int64_t i = 0; i < blend->count; i++)
        if (!(blend->weights[i] > 0) || !isfinite(blend->weights[i]))
            return mt_error_set(error, "%s: the weight of %s must be a positive number", option, blend->paths[i]);
    if (!isfinite(numpy_sum(blend->weights, blend->count)))
        return mt_error_set(error, "%s: the sum of the weights is too large; give smaller ones", option);
    return 0;
}

/* True for a weight that is not the name of a dataset. */
static bool is_weight(const char *word) {
    double weight;
    return parse_weight(&weight, word) && !mt_path_exists(word, (int64_t)strlen(word), ".idx");
}

/* The error of words with weights before some paths only. */
static int refuse_blend(const mt_strings *words, const char *option, mt_error *error) {
    static const char *const advice = "give one path, several paths, or a weight before every path";
    for (int64_t i = 0; i < words->count; i += 2) {
        const char *word = words->items[i];
        if (!is_weight(word)) return mt_error_set(error, "%s: %s has no weight before it; %s", option, word, advice);
        if (i + 1 == words->count || is_weight(words->items[i + 1]))
            return mt_error_set(error, "%s: the weight %s has no path after it; %s", option, word, advice);
    }
    return mt_error_set(error, "%s: %s", option, advice);
}

/* Megatron's rule: an even number of words with a number first in every pair is a list of weights and paths. */
int mt_blend_parse(mt_blend *blend, const mt_strings *words, const char *option, mt_error *error) {
    *blend = (mt_blend){0};
    int64_t pairs = words->count / 2, numbers = 0, weights = 0;
    double number;
    for (int64_t i = 0; i < pairs; i++) numbers += parse_weight(&number, words->items[2 * i]);
    bool weighted = words->count % 2 == 0 && numbers > 0;
    for (int64_t i = 0; i < words->count && !weighted; i++) weights += is_weight(words->items[i]);
    if (weights > 0 || (weighted && numbers < pairs) || words->count == 0 || words->count >= INT16_MAX)
        return refuse_blend(words, option, error);
    blend->count = weighted ? pairs : words->count;
    blend->paths = mt_malloc(blend->count * (int64_t)sizeof *blend->paths);
    blend->weights = weighted ? mt_malloc(blend->count * (int64_t)sizeof *blend->weights) : NULL;
    for (int64_t i = 0; i < blend->count; i++) {
        blend->paths[i] = words->items[weighted ? 2 * i + 1 : i];
        if (weighted) parse_weight(&blend->weights[i], words->items[2 * i]);
    }
    if (!weighted || check_weights(blend, option, error) == 0) return 0;
    mt_blend_free(blend);
    return -1;
}
