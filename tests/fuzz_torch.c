/* fuzz_torch.c: archives of torch.save, pickles, and files of a Megatron-LM checkpoint are any bytes: they are refused
 * in one line, or read. The first byte selects the kind. */
#include "../data/base/file.h"
#include "../data/checkpoint/megatron_folder.h"
#include "../data/checkpoint/torch_pickle.h"
#include "../data/checkpoint/torch_zip.h"
#include "new_folder.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerInitialize(int *argc, char ***argv);

static char root[64];
static const char *const files[] = {"torch/mp_rank_00/model_optim_rng.pt", "dist/.metadata", "dist/__0_0.distcp"};
enum { NUM_FILES = sizeof files / sizeof *files };

static void remove_root(void) {
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", root);
    if (system(command) != 0) abort();
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    static const char *const folders[] = {"torch", "torch/mp_rank_00", "dist"};
    (void)argc, (void)argv;
    if (new_folder(root) != 0) abort();
    atexit(remove_root);
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        char *path = mt_path_join(root, folders[i]);
        if (mkdir(path, 0700) != 0) abort();
        free(path);
    }
    return 0;
}

static void refused_in_one_line(const mt_error *error) {
    if (!error->text[0] || strchr(error->text, '\n')) abort();
}

static void read_pickle(const void *data, int64_t bytes) {
    mt_error error = {{0}};
    mt_pickle *pickle;
    mt_torch_tensor tensor;
    if (mt_pickle_read(&pickle, data, bytes, "file", &error) != 0) {
        refused_in_one_line(&error);
        return;
    }
    const mt_pickled *root_value = mt_pickle_root(pickle);
    mt_pickled_tensor(root_value, &tensor);
    for (int64_t i = 0; root_value->kind == MT_PICKLED_DICT && i < root_value->count; i++)
        if (mt_pickled_tensor(root_value->items[2 * i + 1], &tensor) && tensor.contiguous &&
            tensor.first + tensor.count > tensor.elements)
            abort();
    mt_pickle_free(pickle);
}

static void read_zip(const uint8_t *data, int64_t bytes) {
    mt_error error = {{0}};
    mt_zip zip;
    if (mt_zip_open(&zip, data, bytes, "file", &error) != 0) refused_in_one_line(&error);
    for (int64_t i = 0; i < zip.count && *error.text == 0; i++) {
        const mt_zip_entry *entry = &zip.entries[i];
        if (entry->data < data || entry->data + entry->bytes > data + bytes) abort();
        read_pickle(entry->data, entry->bytes);
    }
    mt_zip_free(&zip);
}

/* The file beside those of the inputs before, which may fit. */
static void read_folder(int file, const uint8_t *data, size_t size) {
    mt_error error = {{0}};
    mt_megatron *checkpoint;
    char *path = mt_path_join(root, files[file]), *folder = mt_path_join(root, file == 0 ? "torch" : "dist");
    FILE *stream = fopen(path, "wb");
    if (stream && size > 0) fwrite(data, 1, size, stream);
    if (stream) fclose(stream);
    for (int weights = 0; weights < 2; weights++) {
        if (mt_megatron_open(&checkpoint, folder, weights, &error) != 0) {
            refused_in_one_line(&error);
            continue;
        }
        mt_megatron_run run = mt_megatron_read_run(checkpoint);
        if (run.iteration < 0 || run.optimizer_step < 0) abort();
        mt_megatron_close(checkpoint);
    }
    free(path), free(folder);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0) return 0;
    int kind = data[0] % (2 + NUM_FILES);
    uint8_t *copy = mt_malloc((int64_t)size);
    memcpy(copy, data + 1, size - 1);
    if (kind == 0)
        read_pickle(copy, (int64_t)size - 1);
    else if (kind == 1)
        read_zip(copy, (int64_t)size - 1);
    else
        read_folder(kind - 2, copy, size - 1);
    free(copy);
    return 0;
}
