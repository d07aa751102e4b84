/* fuzz_folder.c: one file of a checkpoint is any bytes: the folder is refused with one line, or loads whole. The first
 * byte selects the file; the rest is its contents. */
#include "../data/base/file.h"
#include "../data/base/safetensors.h"
#include "../data/models/special_tokens.h"
#include "../data/options/option_reader.h"
#include "../data/options/option_rules.h"
#include "../data/options/options.h"
#include "../data/models/generate.h"
#include "../data/checkpoint/checkpoint_folder.h"
#include "../data/checkpoint/checkpoint_load.h"
#include "../data/checkpoint/checkpoint_save.h"
#include "../data/checkpoint/run_options.h"
#include "new_folder.h"

#include <ftw.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

/* The checkpoint is of the version without checksums, so that they do not refuse every change. */
static const char *const names[] = {"trainer.json",   "model.safetensors.index.json",
                                    "config.json",    "generation_config.json",
                                    "checksums.json", "../latest_checkpointed_iteration.txt"};
enum { NUM_NAMES = sizeof names / sizeof *names, CHECKSUMS = 4 };

static char root[64];
static mt_grid grid;
static mt_run_options shape; // of the model that loads
static mt_model *model;
static char *contents[NUM_NAMES]; // of the whole checkpoint; NULL: no such file
static int64_t lengths[NUM_NAMES];

static void check(int status, const mt_error *error) {
    if (status != 0) mt_die("%s", error->text);
}

static void refused_in_one_line(const mt_error *error) {
    if (!error->text[0] || strchr(error->text, '\n')) abort();
}

static char *path_of(int file) {
    char *folder = mt_path_join(root, "iter_0000001"), *path = mt_path_join(folder, names[file]);
    free(folder);
    return path;
}

/* Not by mt_file_write, which would wait for the disk. */
static void write_file(int file, const void *bytes, size_t size) {
    char *path = path_of(file);
    FILE *stream = bytes ? fopen(path, "wb") : NULL;
    if (!bytes) unlink(path);
    if (stream && size > 0) fwrite(bytes, 1, size, stream);
    if (stream) fclose(stream);
    free(path);
}

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *walk) {
    (void)status, (void)type, (void)walk;
    return remove(path);
}

static void remove_root(void) {
    nftw(root, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

/* Puts the weights under another name, which only the index has. */
static void keep_contents(void) {
    mt_error error;
    char *folder = mt_path_join(root, "iter_0000001"), *from = mt_path_join(folder, "model.safetensors");
    char *to = mt_path_join(folder, "weights");
    MT_CHECK(rename(from, to) == 0);
    for (int i = 0; i < NUM_NAMES; i++) {
        char *path = path_of(i);
        if (access(path, F_OK) == 0)
            check((contents[i] = mt_file_read(path, 1 << 20, &lengths[i], &error)) ? 0 : -1, &error);
        free(path);
    }
    for (char *at = contents[1]; (at = strstr(at, "model.safetensors\""));) memcpy(at, "weights\"          ", 18);
    for (char *at = contents[0]; (at = strstr(at, "\"version\": 2"));) at[11] = '1';
    for (int i = 0; i < NUM_NAMES; i++) write_file(i, i == CHECKSUMS ? NULL : contents[i], (size_t)lengths[i]);
    free(folder), free(from), free(to);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    static char line[] = "train --num-layers 1 --hidden-size 8 --ffn-hidden-size 16 --num-attention-heads 1 "
                         "--max-position-embeddings 8 --vocab-size 16 --seq-length 8 --mock-data --lr 1e-3 "
                         "--train-iters 10 --device cpu --swiglu --normalization RMSNorm --disable-bias-linear "
                         "--position-embedding-type rope --untie-embeddings-and-output-weights";
    static char *arguments[64], **words = arguments;
    static int count;
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    mt_model_plan plan = {.max_tokens = 8, .max_logits = 8, .max_position = 8, .train = true};
    mt_run_state state = {.iteration = 1, .consumed_train_samples = 1, .optimizer_step = 1};
    mt_error error;
    (void)argc, (void)argv;
    if (new_folder(root) != 0) abort();
    mt_grid_start(&grid, &count, &words);
    check(mt_options_parse(&shape, MT_PROGRAM_TRAIN, count, words, &error), &error);
    check(mt_options_finish(&shape, MT_PROGRAM_TRAIN, 1, &error), &error);
    check(mt_grid_build(&grid, &shape.stack, &error), &error);
    check(mt_model_create(&model, &shape.stack, &grid, &mt_cpu_ops, &plan, &error), &error);
    mt_model_init(model);
    check(mt_checkpoint_save(model, &shape, &state, root, NULL, NULL, &error), &error);
    atexit(remove_root);
    keep_contents();
    return 0;
}

/* A model of the shape that config.json describes, if it is small, takes the weights or refuses them. */
static void load_shape(const mt_run_options *options) {
    mt_error error;
    mt_model *other = NULL;
    mt_run_state state;
    mt_model_plan plan = mt_generator_plan(1, 4, 4);
    if (mt_num_parameters(&options->stack) > 20000 || options->stack.num_layers > 4 ||
        options->stack.max_position_embeddings > 1000)
        return;
    if (mt_model_create(&other, &options->stack, &grid, &mt_cpu_ops, &plan, &error) != 0 ||
        mt_checkpoint_load(other, options, &state, root, &error) != 0)
        refused_in_one_line(&error);
    mt_model_destroy(other);
}

/* The folder as `infer --load` reads it. */
static void read_shape(void) {
    mt_run_options options;
    mt_error error;
    mt_stops stops;
    mt_options_default(&options);
    if (mt_options_set(&options, "load", root, &error) != 0) abort();
    if (mt_options_read_shape(&options, &error) != 0) {
        refused_in_one_line(&error);
    } else if (mt_options_finish(&options, MT_PROGRAM_INFER, 1, &error) != 0) {
        refused_in_one_line(&error);
    } else {
        char *folder = mt_checkpoint_resolve(root, &error);
        if (folder && mt_stops_of_options(&stops, &options, &error) != 0) refused_in_one_line(&error);
        free(folder);
        load_shape(&options);
    }
    mt_options_free(&options);
}

/* The whole folder, as a run that resumes. */
static void load(void) {
    mt_run_state state;
    mt_error error;
    if (mt_checkpoint_load(model, &shape, &state, root, &error) != 0) {
        refused_in_one_line(&error);
        return;
    }
    if (state.iteration < 0 || state.consumed_train_samples < 0 || state.optimizer_step < 0) abort();
    state.iteration++, state.optimizer_step++, state.consumed_train_samples += shape.stack.global_batch_size;
    mt_learning_rate(&shape.stack, state.consumed_train_samples);
    if (state.consumed_train_samples * shape.stack.seq_length < 0) abort();
}

/* Sums of any text: with the last line, which is the text's own sum. */
static void write_checksums(const uint8_t *data, size_t size) {
    char *text = mt_malloc((int64_t)size + 64);
    if (size > 0) memcpy(text, data, size);
    text[size] = '\n';
    int line = sprintf(text + size + 1, "\"before_this_line\": \"%08x\"}\n", mt_crc32c(text, (int64_t)size + 1));
    write_file(CHECKSUMS, text, size + 1 + (size_t)line);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    mt_error error = {{0}};
    if (size == 0) return 0;
    int file = data[0] % NUM_NAMES;
    if (file == CHECKSUMS)
        write_checksums(data + 1, size - 1);
    else
        write_file(file, data + 1, size - 1);
    char *folder = mt_checkpoint_resolve_whole(root, &error);
    if (!folder) refused_in_one_line(&error);
    if (folder && file <= 1) load();
    if (folder && (file == 2 || file == 3)) read_shape();
    free(folder);
    write_file(file, file == CHECKSUMS ? NULL : contents[file], (size_t)lengths[file]);
    return 0;
}
