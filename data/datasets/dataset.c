/* dataset.c: the splits of a run; mock data and token files. */
#include "dataset.h"

#include "../base/file.h"
#include "../options/option_rules.h"
#include "gpt_dataset.h"
#include "packing.h"
#include "sft.h"
#include "t5_dataset.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- mock data --------------------------------------------------------------------------------------------------- */

typedef struct mock_dataset {
    mt_dataset base;
    int64_t vocab_size, eod_id;
    uint64_t key;
} mock_dataset;

/* Token t is a function of the seed and the coordinate (sample, t). */
static int mock_dataset_get(const mt_dataset *base, int64_t index, int32_t *tokens, mt_error *error) {
    (void)error;
    const mock_dataset *mock = (const mock_dataset *)base;
    bool begin = true;
    for (int64_t t = 0; t <= base->seq_length; t++) {
        uint32_t word[4];
        mt_philox(word, mock->key, (uint64_t)index, (uint64_t)t);
        bool end = !begin && word[0] % 16 == 0;
        if (begin || (end && mock->eod_id < 0))
            tokens[t] = (int32_t)(word[1] % (uint64_t)mock->vocab_size);
        else
            tokens[t] = end ? (int32_t)mock->eod_id : (int32_t)((tokens[t - 1] + 1) % mock->vocab_size);
        begin = tokens[t] == mock->eod_id;
    }
    return 0;
}

static void mock_dataset_free(mt_dataset *base) {
    free(base);
}

static mt_dataset *mock_dataset_create(const mt_data_config *config, mt_split split) {
    mock_dataset *mock = mt_calloc(sizeof *mock);
    mock->base = (mt_dataset){.num_samples = config->sizes[split],
                              .seq_length = config->seq_length,
                              .get = mock_dataset_get,
                              .free = mock_dataset_free};
    mock->vocab_size = config->vocab_size;
    mock->eod_id = config->eod_id < config->vocab_size ? config->eod_id : -1;
    mock->key = mt_random_key((uint64_t)config->seed, UINT64_C(0x6d6f636b), (uint64_t)split); // "mock"
    return &mock->base;
}

/* ---- a file of tokens -------------------------------------------------------------------------------------------- */

typedef struct tokens_file_dataset {
    mt_dataset base;
    mt_mapping file;
    int descriptor;
    char *path;
    int64_t vocab_size;
} tokens_file_dataset;

static int tokens_file_get(const mt_dataset *base, int64_t index, int32_t *tokens, mt_error *error) {
    const tokens_file_dataset *dataset = (const tokens_file_dataset *)base;
    int64_t row = base->seq_length + 1;
    if (mt_file_check_size(dataset->descriptor, dataset->file.size, dataset->path, error) != 0) return -1;
    memcpy(tokens, dataset->file.bytes + index * row * 4, (size_t)row * 4);
    for (int64_t i = 0; i < row; i++)
        if (tokens[i] < 0 || tokens[i] >= dataset->vocab_size)
            return mt_error_set(error,
                                "--tokens-file %s: sequence %lld holds token %d, but the vocabulary has %lld tokens",
                                dataset->path, (long long)index, (int)tokens[i], (long long)dataset->vocab_size);
    return 0;
}

static void tokens_file_free(mt_dataset *base) {
    tokens_file_dataset *dataset = (tokens_file_dataset *)base;
    mt_mapping_close(&dataset->file);
    if (dataset->descriptor >= 0) close(dataset->descriptor);
    free(dataset->path);
    free(dataset);
}

static int tokens_file_check(tokens_file_dataset *dataset, int64_t wanted, mt_error *error) {
    int64_t row = dataset->base.seq_length + 1, size = dataset->file.size;
    if (size % (row * 4) != 0)
        return mt_error_set(error,
                            "--tokens-file %s: %lld bytes are not whole sequences of %lld int32 (--seq-length + "
                            "1); change --seq-length or the file",
                            dataset->path, (long long)size, (long long)row);
    dataset->base.num_samples = dataset->base.num_documents = size / (row * 4);
    dataset->base.num_tokens = size / 4;
    if (dataset->base.num_samples < wanted)
        return mt_error_set(error,
                            "--tokens-file %s: holds %lld sequences, training needs %lld; give a longer file or "
                            "fewer --train-iters",
                            dataset->path, (long long)dataset->base.num_samples, (long long)wanted);
    return 0;
}

static int tokens_file_create(mt_dataset **out, const mt_data_config *config, mt_error *error) {
    tokens_file_dataset *dataset = mt_calloc(sizeof *dataset);
    dataset->base = (mt_dataset){.seq_length = config->seq_length, .get = tokens_file_get, .free = tokens_file_free};
    dataset->path = mt_strdup(config->tokens_file);
    dataset->vocab_size = config->vocab_size;
    int64_t size;
    dataset->descriptor = mt_file_open(config->tokens_file, &size, error);
    int result = dataset->descriptor < 0 ? -1 : 0;
    if (result == 0) result = mt_mapping_make(&dataset->file, dataset->descriptor, size, config->tokens_file, error);
    if (result == 0) result = tokens_file_check(dataset, config->sizes[MT_SPLIT_TRAIN], error);
    if (result != 0) tokens_file_free(&dataset->base);
    *out = result == 0 ? &dataset->base : NULL;
    return result;
}

/* ---- the splits of a run ----------------------------------------------------------------------------------------- */

struct mt_data {
    mt_dataset *splits[MT_NUM_SPLITS];
    int64_t num_indexed;
    mt_indexed_dataset **indexed; // the files of the splits
    uint64_t *prints;             // [num_indexed] their fingerprints, once mt_data_agree has taken them; else NULL
    int64_t num_train_indexed;    // the first of them are those of the training split
    const tokens_file_dataset *tokens_file;
    mt_samples samples[MT_NUM_SPLITS]; // of datasets of rows
    mt_dataset **more_sets;            // of multiple_validation_sets, after the first
    int64_t num_more_sets;
};

const mt_dataset *mt_data_split(const mt_data *data, mt_split split) {
    return data->splits[split];
}

const mt_dataset *mt_data_validation_set(const mt_data *data, int64_t index) {
    return index <= data->num_more_sets ? data->more_sets[index - 1] : NULL;
}

void mt_data_close(mt_data *data) {
    if (!data) return;
    for (int64_t i = 0; i < data->num_more_sets; i++) mt_dataset_free(data->more_sets[i]);
    free(data->more_sets);
    for (int split = 0; split < MT_NUM_SPLITS; split++) mt_dataset_free(data->splits[split]);
    for (int64_t i = 0; i < data->num_indexed; i++) mt_indexed_dataset_close(data->indexed[i]);
    for (int split = 0; split < MT_NUM_SPLITS; split++) mt_samples_free(&data->samples[split]);
    free(data->indexed);
    free(data->prints);
    free(data);
}

int64_t mt_data_max_patches(const mt_data *data, int64_t tokens) {
    int64_t most = 0;
    for (int split = 0; split < MT_NUM_SPLITS; split++)
        most = mt_max(most, mt_samples_max_patches(&data->samples[split], tokens));
    return most;
}

static void take_fingerprints(mt_data *data) {
    if (data->prints) return;
    data->prints = mt_calloc(mt_max(data->num_indexed, 1) * 8);
    for (int64_t i = 0; i < data->num_indexed; i++) data->prints[i] = mt_indexed_dataset_fingerprint(data->indexed[i]);
}

int mt_data_agree(mt_data *data, const mt_group *world, mt_error *error) {
    int64_t count = 0, most = data->num_indexed + MT_NUM_SPLITS + 1;
    uint64_t *prints = mt_calloc(most * 8);
    const char **names = mt_calloc(most * (int64_t)sizeof *names);
    take_fingerprints(data);
    for (int64_t i = 0; i < data->num_indexed; i++, count++) {
        prints[count] = data->prints[i];
        names[count] = mt_indexed_dataset_prefix(data->indexed[i]);
    }
    for (int split = 0; split < MT_NUM_SPLITS; split++) {
        if (data->samples[split].count == 0) continue;
        prints[count] = mt_samples_fingerprint(&data->samples[split]);
        names[count++] = split == MT_SPLIT_TRAIN ? "set of samples" : "set of samples to evaluate";
    }
    if (data->tokens_file) {
        const mt_mapping *file = &data->tokens_file->file;
        prints[count] = mt_contents_fingerprint(file->bytes, file->size, false);
        names[count++] = data->tokens_file->path;
    }
    int status = mt_fingerprints_agree(prints, names, count, world, error);
    free(prints);
    free(names);
    return status;
}

/* Opens every path of a blend and appends it to data->indexed. */
static int open_paths(mt_data *data, const mt_blend *blend, mt_error *error) {
    int64_t count = data->num_indexed + blend->count;
    data->indexed = mt_realloc(data->indexed, count * (int64_t)sizeof *data->indexed);
    for (int64_t i = 0; i < blend->count; i++) {
        if (mt_indexed_dataset_open(&data->indexed[data->num_indexed], blend->paths[i], error) != 0) return -1;
        data->num_indexed++;
    }
    return 0;
}

/* The number of units that --split divides: sequences, or with masked spans documents of sentences. */
static int64_t num_divided(const mt_indexed_dataset *indexed, const mt_data_config *config) {
    const mt_indexed_index *index = mt_indexed_dataset_index(indexed);
    return config->spans ? index->num_documents : index->num_sequences;
}

/* The sequence or document at a fraction of all, rounded like Python's round (half to even). */
static int64_t sequence_at(const mt_indexed_dataset *indexed, double fraction, const mt_data_config *config) {
    return (int64_t)nearbyint(fraction * (double)num_divided(indexed, config));
}

/* The sizes that a split is ordered for: that of the run's start, then those of its extensions. A cyclic loader never
 * comes to an end, so that an extension needs no more samples. */
typedef struct split_sizes {
    int64_t count, sizes[MT_MAX_DATA_PLANS];
} split_sizes;

static split_sizes sizes_of(const mt_data_config *config, mt_split split) {
    split_sizes all = {.count = 1, .sizes = {config->sizes[split]}};
    if (split == MT_SPLIT_VALID && config->full_validation) return (split_sizes){.count = 1, .sizes = {-1}};
    if (config->num_plans == 0 || split == MT_SPLIT_TEST) return all;
    all.count = config->dataloader_type == MT_DATALOADER_CYCLIC ? 1 : config->num_plans;
    for (int64_t i = 0; i < all.count; i++) all.sizes[i] = config->plans[i][split];
    return all;
}

/* One split of one path: the sequences between two fractions of all. */
static int create_source(mt_dataset **out, const mt_indexed_dataset *indexed, const double share[2],
                         const split_sizes *sizes, const mt_data_config *config, mt_error *error) {
    return mt_indexed_dataset_extend(out, indexed, sequence_at(indexed, share[0], config),
                                     sequence_at(indexed, share[1], config), sizes->sizes, sizes->count, config, error);
}

/* An error if data that are read once have fewer samples than the run needs. */
static int check_once(const char *name, int64_t have, int64_t wanted, const mt_data_config *config, mt_error *error) {
    if (!config->reads_once || wanted <= have) return 0;
    return mt_error_set(error,
                        "--dataloader-type single reads the data once: %s has %lld samples to train on and the run "
                        "needs %lld; train on fewer, or leave out --dataloader-type, and further epochs follow",
                        name, (long long)have, (long long)wanted);
}

static int check_source_once(const mt_dataset *source, mt_split split, int64_t wanted, const mt_data_config *config,
                             mt_error *error) {
    int64_t have = mt_dataset_epoch(source);
    return split == MT_SPLIT_TRAIN ? check_once(mt_gpt_dataset_prefix(source), have, wanted, config, error) : 0;
}

/* The sources of a blend, their weights, and its size. */
typedef struct blend_sources {
    mt_dataset **items;
    double *weights;
    int64_t size;
} blend_sources;

/* With weights, the size of a source is its part of the blend plus Megatron's surplus. Without weights, every source is
 * read for one epoch and its weight is its number of samples. Sets the weights and the size. A blend draws its
 * samples in an order that does not depend on its size, so that an extension extends the sources alone. */
static int create_sources(blend_sources *sources, mt_indexed_dataset *const *indexed, const mt_blend *blend,
                          mt_split split, const double share[2], const split_sizes *sizes, const mt_data_config *config,
                          mt_error *error) {
    double *weights = sources->weights;
    if (blend->weights) mt_weights_normalize(weights, blend->weights, blend->count);
    int64_t wanted = sizes->sizes[sizes->count - 1], total = 0;
    for (int64_t i = 0; i < blend->count; i++) {
        split_sizes asked = {.count = 1, .sizes = {-1}};
        int64_t target = 0;
        for (int64_t k = 0; k < sizes->count && blend->weights; k++) {
            target = mt_blend_target(weights[i], sizes->sizes[k]);
            asked.sizes[k] = mt_blend_surplus(target);
            asked.count = sizes->count;
        }
        if (create_source(&sources->items[i], indexed[i], share, &asked, config, error) != 0) return -1;
        if (blend->weights && check_source_once(sources->items[i], split, target, config, error) != 0) return -1;
        if (!blend->weights) weights[i] = (double)sources->items[i]->num_samples;
        total += blend->weights ? target : sources->items[i]->num_samples;
    }
    bool ends = config->dataloader_type == MT_DATALOADER_SINGLE;
    if (!blend->weights && total < wanted && ends)
        return mt_error_set(
            error,
            "the data paths (%s and more) hold %lld samples in one epoch, but the run needs %lld; give a weight "
            "before every path, to read paths more than once",
            blend->paths[0], (long long)total, (long long)wanted);
    sources->size = blend->weights || wanted < 0 || total < wanted ? total : wanted;
    return 0;
}

static int create_blend(mt_dataset **out, mt_indexed_dataset *const *indexed, const mt_blend *blend, mt_split split,
                        const double share[2], const split_sizes *sizes, const mt_data_config *config,
                        mt_error *error) {
    blend_sources sources = {.items = mt_calloc(blend->count * (int64_t)sizeof *sources.items)};
    sources.weights = mt_calloc(blend->count * (int64_t)sizeof *sources.weights);
    int result = create_sources(&sources, indexed, blend, split, share, sizes, config, error);
    if (result == 0)
        result = mt_blended_dataset_create(out, sources.items, sources.weights, blend->count, sources.size, error);
    else
        for (int64_t i = 0; i < blend->count; i++) mt_dataset_free(sources.items[i]);
    free(sources.items);
    free(sources.weights);
    return result;
}

/* With few documents a small share may have none. */
static bool lacks_documents(mt_indexed_dataset *const *indexed, int64_t count, const double share[2],
                            const mt_data_config *config) {
    for (int64_t i = 0; i < count; i++)
        if (sequence_at(indexed[i], share[0], config) == sequence_at(indexed[i], share[1], config)) return true;
    return false;
}

/* One split of a blend, or, if `direct`, of its only path. `share`: the fractions of every path that bound the split.
 */
static int create_split(mt_data *data, mt_split split, const mt_blend *blend, bool direct, const double share[2],
                        const mt_data_config *config, mt_error *error) {
    mt_indexed_dataset *const *indexed = data->indexed + data->num_indexed - blend->count;
    split_sizes sizes = sizes_of(config, split);
    if (config->sizes[split] == 0 || !(share[0] < share[1])) return 0;
    if (split != MT_SPLIT_TRAIN && lacks_documents(indexed, blend->count, share, config)) return 0;
    if (split == MT_SPLIT_TRAIN) data->num_train_indexed = data->num_indexed;
    mt_dataset **out = &data->splits[split];
    if (sizes.sizes[0] < 0 && blend->weights)
        return mt_error_set(error, "--full-validation reads whole data: leave out the weights of the paths");
    if (!direct) return create_blend(out, indexed, blend, split, share, &sizes, config, error);
    if (create_source(out, indexed[0], share, &sizes, config, error) != 0) return -1;
    return check_source_once(*out, split, config->sizes[split], config, error);
}

/* --data-path: all splits share the same paths. */
static int open_data_path(mt_data *data, const mt_data_config *config, mt_error *error) {
    double edges[MT_NUM_SPLITS + 1];
    mt_blend blend;
    if (mt_split_parse(edges, config->split ? config->split : "969,30,1", error) != 0) return -1;
    if (mt_blend_parse(&blend, &config->data_path, "--data-path", error) != 0) return -1;
    bool direct = blend.count == 1 && !blend.weights;
    int result = open_paths(data, &blend, error);
    if (result == 0 && config->sizes[MT_SPLIT_TRAIN] > 0 && !(edges[MT_SPLIT_TRAIN] < edges[MT_SPLIT_TRAIN + 1]))
        result = mt_error_set(error, "--split %s leaves no data for training; its first share must be above 0",
                              config->split);
    for (int split = 0; split < MT_NUM_SPLITS && result == 0; split++)
        result = create_split(data, split, &blend, direct, edges + split, config, error);
    mt_blend_free(&blend);
    return result;
}

/* --multiple-validation-sets: each path of --valid-data-path for one epoch. */
static int create_validation_sets(mt_data *data, const mt_blend *blend, const mt_data_config *config, mt_error *error) {
    static const double whole[2] = {0, 1};
    mt_indexed_dataset *const *indexed = data->indexed + data->num_indexed - blend->count;
    split_sizes sizes = sizes_of(config, MT_SPLIT_VALID);
    if (blend->weights)
        return mt_error_set(error, "--multiple-validation-sets: leave out the weights of --valid-data-path");
    data->more_sets = mt_calloc(blend->count * (int64_t)sizeof *data->more_sets);
    for (int64_t i = 0; i < blend->count; i++) {
        mt_dataset **out = i == 0 ? &data->splits[MT_SPLIT_VALID] : &data->more_sets[i - 1];
        if (create_source(out, indexed[i], whole, &sizes, config, error) != 0) return -1;
        data->num_more_sets = i;
    }
    return 0;
}

/* --train-data-path and so on: every split has its own paths. */
static int open_split_data_path(mt_data *data, mt_split split, const mt_data_config *config, mt_error *error) {
    static const char *const options[] = {"--train-data-path", "--valid-data-path", "--test-data-path"};
    static const double whole[2] = {0, 1};
    mt_blend blend;
    if (config->split_data_path[split].count == 0) return 0;
    if (mt_blend_parse(&blend, &config->split_data_path[split], options[split], error) != 0) return -1;
    int result = open_paths(data, &blend, error);
    bool sets = split == MT_SPLIT_VALID && config->multiple_validation_sets && config->sizes[split] > 0;
    if (result == 0 && sets)
        result = create_validation_sets(data, &blend, config, error);
    else if (result == 0)
        result = create_split(data, split, &blend, blend.count == 1, whole, config, error);
    mt_blend_free(&blend);
    return result;
}

/* An epoch of mock data for each split. */
static void open_mock_samples(mt_data *data, const mt_data_config *config) {
    enum { MOCK_SAMPLES = 4096 };
    for (int split = 0; split < MT_NUM_SPLITS; split++) {
        if (config->sizes[split] == 0) continue;
        mt_samples_mock(&data->samples[split], MOCK_SAMPLES, config, split);
        int64_t items = mt_samples_items(&data->samples[split]);
        data->splits[split] = mt_row_dataset_create(&data->samples[split], 0, items, split, config);
        data->splits[split]->num_documents = data->splits[split]->num_tokens = 0; // generated
    }
}

static int read_samples(mt_samples *samples, const mt_strings *paths, const mt_data_config *config, mt_error *error) {
    const mt_run_options *o = config->options;
    mt_image_reader images;
    bool reads = o->stack.vision.tower != MT_VISION_NONE;
    if (reads && mt_image_reader_open(&images, o, config->tokenizer_path, error) != 0) return -1;
    mt_sft_config files = {.paths = *paths,
                           .tokenizer_path = config->tokenizer_path,
                           .vocab_size = config->vocab_size,
                           .seq_length = o->stack.seq_length,
                           .chat_template = o->chat_template,
                           .chat_template_kwargs = o->chat_template_kwargs,
                           .loss_on = o->loss_on,
                           .long_samples = o->long_samples,
                           .skip_bad_samples = o->skip_bad_samples,
                           .messages_key = o->messages_key,
                           .prompt_key = o->prompt_key,
                           .query_key = o->query_key,
                           .response_key = o->response_key,
                           .whole = o->stack.stage == MT_STAGE_RM,
                           .pairs = config->pairs,
                           .input_length = o->stack.decoder_num_layers > 0 ? o->stack.encoder_seq_length : 0,
                           .end_id = config->eod_id,
                           .chosen_key = o->chosen_key,
                           .rejected_key = o->rejected_key,
                           .ref_logps = o->ref_logps_in_data,
                           .masks_eod = config->eod_mask_loss,
                           .eod_id = config->eod_id,
                           .image_key = o->image_key,
                           .image_folder = o->image_folder,
                           .images = reads ? &images : NULL,
                           .log = config->log};
    return mt_samples_read(samples, &files, config->tokenizer, error);
}

/* Samples of any length: --data-path divided by --split, in order of the files, or files for each split. */
static int open_samples(mt_data *data, const mt_data_config *config, mt_error *error) {
    double edges[MT_NUM_SPLITS + 1];
    bool divides = config->data_path.count > 0;
    if (config->mock_data) {
        open_mock_samples(data, config);
        return 0;
    }
    if (divides && mt_split_parse(edges, config->split ? config->split : "969,30,1", error) != 0) return -1;
    if (divides && read_samples(&data->samples[0], &config->data_path, config, error) != 0) return -1;
    for (int split = 0; split < MT_NUM_SPLITS; split++) {
        const mt_strings *paths = &config->split_data_path[split];
        mt_samples *samples = &data->samples[divides ? 0 : split];
        if (config->sizes[split] == 0 || (!divides && paths->count == 0)) continue;
        if (!divides && read_samples(samples, paths, config, error) != 0) return -1;
        double count = (double)mt_samples_items(samples);
        int64_t begin = divides ? (int64_t)nearbyint(edges[split] * count) : 0;
        int64_t end = divides ? (int64_t)nearbyint(edges[split + 1] * count) : (int64_t)count;
        if (begin < end) data->splits[split] = mt_row_dataset_create(samples, begin, end, split, config);
    }
    const mt_dataset *train = data->splits[MT_SPLIT_TRAIN];
    if (train && config->reads_once) { // the last step may have fewer rows
        int64_t have = mt_packing_count(train->packing, 1), batch = config->options->stack.global_batch_size;
        int64_t wanted = config->train_epochs > 1 ? train->num_samples : config->sizes[MT_SPLIT_TRAIN];
        const mt_strings *paths = divides ? &config->data_path : &config->split_data_path[MT_SPLIT_TRAIN];
        if (wanted - have >= batch || config->train_epochs > 1)
            return check_once(paths->items[0], have, wanted, config, error);
    }
    if (train) return 0;
    return mt_error_set(error, "--split %s leaves no sample for training; its first share must be above 0",
                        config->split ? config->split : "969,30,1");
}

static const char *const split_names[MT_NUM_SPLITS] = {"training", "validation", "test"};

static int check_config(const mt_data_config *config, mt_error *error) {
    int64_t split_paths = 0;
    for (int split = 0; split < MT_NUM_SPLITS; split++) {
        split_paths += config->split_data_path[split].count;
        if (config->sizes[split] < 0 || config->sizes[split] >= UINT32_MAX - 1)
            return mt_error_set(error, "%lld %s samples are more than the limit of %lld; lower %s",
                                (long long)config->sizes[split], split_names[split], (long long)UINT32_MAX - 2,
                                split == MT_SPLIT_TRAIN ? "--train-iters, --train-samples or --global-batch-size"
                                                        : "--eval-iters");
    }
    int sources = (config->data_path.count > 0) + (split_paths > 0) + config->mock_data + (config->tokens_file != NULL);
    if (sources != 1)
        return mt_error_set(error, "give exactly one of --data-path, --train-data-path (with --valid-data-path and "
                                   "--test-data-path), --tokens-file and --mock-data");
    if (config->seq_length < 1 || config->vocab_size < 1)
        return mt_error_set(error, "--seq-length and the vocabulary size must be at least 1");
    if (config->seed < 0 || config->seed > UINT32_MAX)
        return mt_error_set(error, "%s %lld: must be in [0, 4294967295], the range of NumPy's seeds",
                            config->options && config->options->data_seed >= 0 ? "--data-seed" : "--seed",
                            (long long)config->seed);
    return 0;
}

static int open_splits(mt_data *data, const mt_data_config *config, mt_error *error) {
    if (config->sft) return open_samples(data, config, error);
    if (config->data_path.count > 0) return open_data_path(data, config, error);
    if (config->tokens_file) {
        if (tokens_file_create(&data->splits[MT_SPLIT_TRAIN], config, error) != 0) return -1;
        data->tokens_file = (const tokens_file_dataset *)data->splits[MT_SPLIT_TRAIN];
        return 0;
    }
    for (int split = 0; split < MT_NUM_SPLITS; split++) {
        if (config->mock_data && config->sizes[split] > 0)
            data->splits[split] = config->spans ? mt_t5_mock_create(config, split) : mock_dataset_create(config, split);
        else if (open_split_data_path(data, split, config, error) != 0)
            return -1;
    }
    return 0;
}

mt_data_config mt_data_config_of(const mt_run_options *o, int64_t eod_id) {
    int64_t iterations = o->train_epochs > 0 ? 1 : o->stack.num_iterations; // not known yet; rows never end
    int64_t evaluations = mt_count_evaluations(o, 0, iterations);
    mt_data_config config = {.data_path = o->data_path,
                             .split = o->split,
                             .split_data_path = {o->train_data_path, o->valid_data_path, o->test_data_path},
                             .mock_data = o->mock_data,
                             .tokens_file = o->tokens_file,
                             .seq_length = mt_row_length(&o->stack),
                             .seed = mt_options_data_seed(o),
                             .vocab_size = o->stack.vocab_size,
                             .eod_id = eod_id,
                             .reset_position_ids = o->reset_position_ids,
                             .reset_attention_mask = o->reset_attention_mask,
                             .eod_mask_loss = o->eod_mask_loss,
                             .dataloader_type = o->dataloader_type,
                             .reads_once = MT_GIVEN(o, dataloader_type) && o->dataloader_type == MT_DATALOADER_SINGLE,
                             .full_validation = o->full_validation,
                             .multiple_validation_sets = o->multiple_validation_sets,
                             .options = o,
                             .sft = o->sft,
                             .pairs = mt_trains_on_pairs(&o->stack),
                             .sequence_packing = o->sequence_packing,
                             .variable_seq_lengths = o->variable_seq_lengths,
                             .train_epochs = o->train_epochs,
                             .dynamic_context_parallel = o->stack.dynamic_context_parallel,
                             .context_size = o->stack.context_parallel_size,
                             .min_context_size = o->min_dynamic_context_parallel_size,
                             .rank_tokens = o->max_seqlen_per_dp_cp_rank,
                             .slot_group = o->stack.microbatch_group_size_per_virtual_pipeline_stage,
                             .slot_rest = o->stack.pipeline_model_parallel_size,
                             .meets = mt_has_experts(&o->stack) ||
                                      o->stack.data_parallel_sharding_strategy >= MT_SHARD_GRADS,
                             .work = mt_token_work_of(&o->stack)};
    config.sizes[MT_SPLIT_TRAIN] = mt_consumed_samples(o, iterations);
    config.sizes[MT_SPLIT_VALID] = evaluations * o->eval_iters * mt_eval_batch_size(o);
    if (o->full_validation && evaluations > 0) config.sizes[MT_SPLIT_VALID] = 1; // some
    config.sizes[MT_SPLIT_TEST] = o->eval_interval > 0 ? o->eval_iters * mt_eval_batch_size(o) : 0;
    return config;
}

int mt_data_open(mt_data **out, const mt_data_config *config, mt_error *error) {
    *out = NULL;
    if (check_config(config, error) != 0) return -1;
    mt_data *data = mt_calloc(sizeof *data);
    if (open_splits(data, config, error) != 0) {
        mt_data_close(data);
        return -1;
    }
    *out = data;
    return 0;
}

/* ---- a run that resumes ----------------------------------------------------------------------------------------- */

static uint64_t print_of(uint64_t so_far, const void *bytes, int64_t size) {
    uint64_t both[2] = {so_far, mt_contents_fingerprint(bytes, size, true)};
    return mt_contents_fingerprint(both, sizeof both, true);
}

/* Files of Megatron: their contents, the share of --split that is trained on, the weights of a blend. */
static uint64_t print_indexed(mt_data *data, const mt_data_config *config) {
    take_fingerprints(data);
    bool divides = config->data_path.count > 0;
    const mt_strings *words = divides ? &config->data_path : &config->split_data_path[MT_SPLIT_TRAIN];
    uint64_t print = print_of(0, data->prints, data->num_train_indexed * 8);
    double edges[MT_NUM_SPLITS + 1] = {0, 1};
    mt_blend blend = {0};
    mt_error ignored;
    if (divides) mt_split_parse(edges, config->split ? config->split : "969,30,1", &ignored);
    for (int64_t i = 0; i < data->num_train_indexed; i++) {
        int64_t range[2] = {sequence_at(data->indexed[i], edges[MT_SPLIT_TRAIN], config),
                            sequence_at(data->indexed[i], edges[MT_SPLIT_TRAIN + 1], config)};
        print = print_of(print, range, sizeof range);
    }
    if (config->spans) {
        double masking[] = {config->spans->mask_prob, config->spans->short_seq_prob,
                            (double)config->spans->input_length, (double)config->spans->num_sentinels};
        print = print_of(print, masking, sizeof masking);
    }
    if (mt_blend_parse(&blend, words, "", &ignored) == 0 && blend.weights) {
        double *normalized = mt_malloc(blend.count * (int64_t)sizeof *normalized);
        mt_weights_normalize(normalized, blend.weights, blend.count);
        print = print_of(print, normalized, blend.count * (int64_t)sizeof *normalized);
        free(normalized);
    }
    mt_blend_free(&blend);
    return print;
}

mt_data_identity mt_data_identify(mt_data *data, const mt_data_config *config) {
    const mt_dataset *train = data->splits[MT_SPLIT_TRAIN];
    mt_data_identity identity = {0};
    uint64_t print = 0;
    if (!train || config->mock_data) return identity;
    if (config->sft) {
        print = mt_samples_fingerprint(&data->samples[MT_SPLIT_TRAIN]);
        print = print_of(print, &train->num_documents, sizeof train->num_documents);
    } else if (data->tokens_file) { // a longer run may have a longer file
        print = print_of(0, data->tokens_file->file.bytes, (config->seq_length + 1) * 4);
    } else {
        print = print_indexed(data, config);
    }
    identity = (mt_data_identity){train->num_documents, train->num_tokens, (int64_t)(print >> 1)}; // as JSON holds it
    if (data->tokens_file) identity.documents = identity.tokens = 0;
    return identity;
}

static int refuse_other_data(const mt_run_state *then, const mt_data_identity *now, const mt_data_config *config,
                             mt_error *error) {
    static const char *const advice = "give the former ones, go on with these by --no-load-rng, or begin anew from the "
                                      "weights by --finetune";
    const char *unit = config->sft ? "samples" : "documents";
    if (config->tokens_file)
        return mt_error_set(error, "--tokens-file %s: does not begin with the tokens that the run began with; %s",
                            config->tokens_file, advice);
    if (then->data.documents == now->documents && then->data.tokens == now->tokens)
        return mt_error_set(error,
                            "the training data are not the data of the run's begin: they have as many %s and tokens, "
                            "but another order, other contents, %s; %s",
                            unit,
                            config->sft     ? "other trained tokens (--loss-on)"
                            : config->spans ? "another --split, other weights, or other masked spans"
                                            : "another --split or other weights",
                            advice);
    return mt_error_set(error,
                        "the training data are not the data of the run's begin: %lld %s with %lld tokens then, %lld "
                        "with %lld now, which would change the order of samples; %s",
                        (long long)then->data.documents, unit, (long long)then->data.tokens, (long long)now->documents,
                        (long long)now->tokens, advice);
}

/* Adds the sizes of this run to the plans, if they exceed those of the last one. */
static int extend_plans(mt_run_state *state, const mt_data_config *config, FILE *file, mt_error *error) {
    static const char *const names[] = {"training", "validation"};
    if (state->data.num_plans == 0) {
        for (int k = 0; k < 2; k++) state->data.plans[0][k] = config->sizes[k];
        state->data.num_plans = 1;
        return 0;
    }
    int64_t *last = state->data.plans[state->data.num_plans - 1];
    if (config->sizes[0] <= last[0] && config->sizes[1] <= last[1]) return 0;
    if (state->data.num_plans == MT_MAX_DATA_PLANS)
        return mt_error_set(error,
                            "the run was extended %d times, and no more is possible; go on with a new order of samples "
                            "by --no-load-rng",
                            MT_MAX_DATA_PLANS - 1);
    for (int k = 0; k < 2; k++) {
        last[2 + k] = mt_max(last[k], config->sizes[k]);
        if (file && last[k] > 0 && last[2 + k] > last[k])
            fprintf(file,
                    "note: the run was planned for %lld %s samples and now needs %lld: the order of the former stays, "
                    "and more follow it, so that the order is not that of a run planned for all from its start\n",
                    (long long)last[k], names[k], (long long)last[2 + k]);
    }
    state->data.num_plans++;
    return 0;
}

/* The sizes of a run that goes on, perhaps with other batches: what it has consumed, and what its further steps need.
 */
static void take_progress(mt_data_config *config, const mt_run_state *state) {
    const mt_run_options *o = config->options;
    int64_t iterations = mt_max(o->stack.num_iterations, state->iteration);
    int64_t evaluations = mt_count_evaluations(o, state->iteration, iterations);
    config->sizes[MT_SPLIT_TRAIN] =
        mt_consumed_samples_from(o, state->iteration, state->consumed_train_samples, o->stack.num_iterations);
    if (config->sizes[MT_SPLIT_VALID] > 0 && !config->full_validation)
        config->sizes[MT_SPLIT_VALID] =
            state->consumed_valid_samples + evaluations * o->eval_iters * mt_eval_batch_size(o);
}

int mt_data_resume(mt_data *data, mt_data_config *config, mt_run_state *state, int64_t group, bool *reorders,
                   FILE *file, mt_error *error) {
    mt_data_identity now = mt_data_identify(data, config);
    bool resumes = state->iteration > 0 && !config->options->no_load_rng;
    bool cyclic = config->dataloader_type == MT_DATALOADER_CYCLIC && !config->sft;
    bool plans = !config->sft && !config->mock_data && !config->tokens_file;
    *reorders = false;
    if (resumes && state->data.fingerprint != 0 && state->data.fingerprint != now.fingerprint)
        return refuse_other_data(state, &now, config, error);
    if (resumes && cyclic && state->data.group != 0 && state->data.group != group && file)
        fprintf(file,
                "warning: --dataloader-type cyclic: the order of samples changes here: --micro-batch-size times "
                "data-parallel ranks was %lld and is %lld\n",
                (long long)state->data.group, (long long)group);
    state->data.documents = now.documents;
    state->data.tokens = now.tokens;
    state->data.fingerprint = now.fingerprint;
    state->data.group = group;
    if (!resumes || !plans) state->data.num_plans = 0;
    if (!plans) return 0;
    int64_t opened[2] = {config->sizes[0], config->sizes[1]};
    if (state->iteration > 0) take_progress(config, state);
    if (extend_plans(state, config, cyclic ? NULL : file, error) != 0) return -1;
    config->num_plans = state->data.num_plans;
    memcpy(config->plans, state->data.plans, sizeof config->plans);
    const int64_t *start = config->plans[0];
    *reorders = config->num_plans > 1 || start[0] != opened[0] || start[1] != opened[1];
    return 0;
}

/* ---- warnings */

/* Writers put sequences one after another. */
static void warn_layout(const mt_indexed_dataset *indexed, FILE *file) {
    const mt_indexed_index *index = mt_indexed_dataset_index(indexed);
    const char *prefix = mt_indexed_dataset_prefix(indexed);
    if (index->gaps + index->overlaps > 0)
        fprintf(file,
                "warning: %s.idx: %lld sequences begin behind the end of the one before and %lld before it, sequence "
                "%lld first, but writers put them one after another; unless it is a selection of sequences, the file "
                "is damaged: make it again\n",
                prefix, (long long)index->gaps, (long long)index->overlaps, (long long)index->first_odd);
    if (index->trailing > 0)
        fprintf(file,
                "warning: %s.bin: its last %lld bytes are in no sequence of the .idx; the two files may not belong "
                "together\n",
                prefix, (long long)index->trailing);
}

/* A split of --data-path whose share of some path has no document. */
static void warn_without_documents(const mt_data *data, const mt_data_config *config, const char *shares,
                                   const char *name, const double share[2], FILE *file) {
    int64_t i = 0;
    while (i + 1 < data->num_indexed && !lacks_documents(&data->indexed[i], 1, share, config)) i++;
    long long documents = num_divided(data->indexed[i], config);
    const char *prefix = mt_indexed_dataset_prefix(data->indexed[i]);
    fprintf(file, "warning: no %s data, so no %s loss: ", name, name);
    if (documents == 1)
        fprintf(file, "%s is one document, which --split does not divide; ", prefix);
    else
        fprintf(file, "--split %s leaves it none of the %lld documents of %s; ", shares, documents, prefix);
    fprintf(file, "make more documents of the text, with data/preprocess --documents lines%s\n",
            documents == 1 ? "" : ", or give it a larger share");
}

/* A split that the run would use and the data does not have. For the test split, a share of 0 says so already. */
static void warn_omitted(const mt_data *data, const mt_data_config *config, mt_split split, FILE *file) {
    const char *shares = config->split ? config->split : "969,30,1", *name = split_names[split];
    double edges[MT_NUM_SPLITS + 1] = {0};
    mt_error ignored;
    bool has_share = mt_split_parse(edges, shares, &ignored) == 0 && edges[split] < edges[split + 1];
    if (!config->sft && config->data_path.count > 0 && has_share)
        warn_without_documents(data, config, shares, name, edges + split, file);
    else if (config->data_path.count == 0 || split != MT_SPLIT_TEST)
        fprintf(file, "note: no %s data, so no %s loss: %s\n", name, name,
                config->data_path.count > 0 && has_share ? "its share in --split is no sample"
                : config->data_path.count > 0            ? "its share in --split is 0"
                : config->tokens_file                    ? "--tokens-file is for training only"
                : split == MT_SPLIT_VALID                ? "give --valid-data-path"
                                                         : "give --test-data-path");
}

/* Sequences of less data than their length repeat it. One line a split, for the first such path of a blend. */
static void warn_short(const mt_dataset *dataset, int64_t seq_length, const char *name, FILE *file) {
    mt_dataset *const *sources;
    const mt_dataset *first = NULL;
    int64_t count = mt_blended_dataset_sources(dataset, &sources), all = 0;
    for (int64_t i = 0; i < mt_max(count, 1); i++) {
        const mt_dataset *source = count > 0 ? sources[i] : dataset;
        if (source->num_tokens == 0 || source->num_tokens > seq_length) continue;
        if (!first) first = source;
        all++;
    }
    if (!first) return;
    fprintf(file, "warning: the %s data", name);
    if (count > 0) fprintf(file, " of %s", mt_gpt_dataset_prefix(first));
    fprintf(file,
            " has %lld tokens, fewer than the %lld of a sequence and its last label, so that every sample repeats "
            "them; give more data or a smaller --seq-length",
            (long long)first->num_tokens, (long long)seq_length + 1);
    if (all > 1) fprintf(file, "; paths of this blend that are so short: %lld", (long long)all);
    fprintf(file, "\n");
}

/* A sample with masked spans is sentences, or the first tokens of one. */
static void warn_without_sentences(const mt_indexed_dataset *indexed, const mt_data_config *config, FILE *file) {
    const mt_indexed_index *index = mt_indexed_dataset_index(indexed);
    int64_t most = config->spans->input_length - 2, cut = 0;
    for (int64_t i = 0; i < index->num_sequences; i++) cut += mt_indexed_dataset_length(indexed, i) > most;
    if (cut == 0 || index->num_sequences > index->num_documents) return;
    fprintf(file,
            "warning: %s: its documents are not divided into sentences, and samples have the first %lld tokens of the "
            "%lld that are longer; make it again, with data/preprocess --documents lines or Megatron-LM's "
            "--split-sentences\n",
            mt_indexed_dataset_prefix(indexed), (long long)most, (long long)cut);
}

void mt_data_warn(const mt_data *data, const mt_data_config *config, FILE *file) {
    for (int64_t i = 0; i < data->num_indexed; i++) warn_layout(data->indexed[i], file);
    for (int64_t i = 0; i < data->num_indexed && config->spans; i++)
        warn_without_sentences(data->indexed[i], config, file);
    for (int split = 0; split < MT_NUM_SPLITS; split++) {
        const mt_dataset *dataset = data->splits[split];
        if (!dataset && config->sizes[split] > 0) warn_omitted(data, config, split, file);
        if (dataset && !dataset->packing && !config->spans)
            warn_short(dataset, config->seq_length, split_names[split], file);
    }
}
