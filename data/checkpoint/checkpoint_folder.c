/* checkpoint_folder.c: which checkpoint of a folder: --save writes folders iter_NNNNNNN, and
 * latest_checkpointed_iteration.txt names the last one. */
#include "checkpoint_folder.h"

#include "../base/file.h"
#include "../base/safetensors.h"
#include "checkpoint_trainer.h"
#include "megatron_folder.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int64_t mt_iteration_of(const char *name) {
    if (strncmp(name, "iter_", 5) != 0 || strlen(name) < 12 || strlen(name) > 14) return -1;
    if (strspn(name + 5, "0123456789") != strlen(name + 5)) return -1;
    return strtoll(name + 5, NULL, 10);
}

static int mt_iterations_add(const char *folder, const char *name, void *context) {
    mt_iterations *found = context;
    int64_t number = mt_iteration_of(name);
    (void)folder;
    if (number < 0) return 0;
    found->numbers = mt_realloc(found->numbers, (found->count + 1) * 8);
    found->numbers[found->count++] = number;
    return 0;
}

static int mt_number_descending(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

mt_iterations mt_iterations_list(const char *folder) {
    mt_iterations found = {0};
    mt_folder_visit(folder, mt_iterations_add, &found);
    if (found.count > 0) qsort(found.numbers, (size_t)found.count, 8, mt_number_descending);
    return found;
}

char *mt_iteration_path(const char *folder, int64_t number) {
    char name[64];
    snprintf(name, sizeof name, "iter_%07lld", (long long)number);
    return mt_path_join(folder, name);
}

int mt_checkpoint_verify(const char *folder, int parts, mt_error *error) {
    mt_checksums sums;
    if (mt_checksums_read(&sums, folder, error) != 0) return -1;
    int status = sums.count > 0 ? mt_checksums_verify(&sums, folder, parts, error) : 0;
    bool has_sums = sums.count > 0;
    mt_checksums_free(&sums);
    if (status != 0 || has_sums || !mt_folder_has(folder, "trainer.json")) return status;
    char *path = mt_path_join(folder, "trainer.json");
    json_t *json = mt_json_read(path, error);
    if (!json || json_integer_value(json_object_get(json, "version")) >= MT_TRAINER_VERSION)
        status = mt_error_set(error, "%s: damaged: %s", json ? folder : path,
                              json ? "its checksums.json is not there" : "it is not JSON");
    json_decref(json);
    free(path);
    return status;
}

/* The iteration that latest_checkpointed_iteration.txt names, or -1 with error. */
static int64_t mt_checkpoint_latest(const char *path, mt_error *error) {
    int64_t bytes;
    char *text = mt_file_read(path, 64, &bytes, error);
    if (!text) return -1;
    char *end = text;
    long long iteration = isdigit((unsigned char)*text) ? strtoll(text, &end, 10) : -1;
    while (isspace((unsigned char)*end)) end++;
    bool is_number = iteration >= 0 && iteration <= 999999999 && end == text + bytes;
    free(text);
    if (is_number) return iteration;
    return mt_error_set(error, "%s: holds no iteration number; write the number of a folder iter_NNNNNNN in it", path);
}

bool mt_folder_is_megatron(const char *folder) {
    bool has_tensors =
        mt_folder_has(folder, "model.safetensors") || mt_folder_has(folder, "model.safetensors.index.json");
    return !has_tensors && mt_megatron_format(folder);
}

bool mt_folder_has_weights(const char *folder) {
    return mt_folder_has(folder, "config.json") || mt_folder_has(folder, "adapter_config.json") ||
           mt_folder_is_megatron(folder);
}

bool mt_is_own_link(const char *folder, const char *name) {
    static const char start[] = "latest/";
    char target[sizeof start - 1];
    char *path = mt_path_join(folder, name);
    ssize_t length = readlink(path, target, sizeof target);
    free(path);
    return length == (ssize_t)sizeof target && memcmp(target, start, sizeof target) == 0;
}

/* The folder that a tracker of Megatron-LM names beside it: "release" holds weights alone. To free; NULL: none. */
static char *mt_megatron_release(const char *folder) {
    int64_t bytes;
    mt_error ignored;
    char *tracker = mt_path_join(folder, "latest_checkpointed_iteration.txt");
    char *text = mt_file_read(tracker, 64, &bytes, &ignored), *path = NULL;
    if (text && strncmp(text, "release", 7) == 0 && strspn(text + 7, " \r\n") == strlen(text + 7))
        path = mt_path_join(folder, "release");
    free(tracker), free(text);
    return path;
}

static int mt_note_gguf(const char *folder, const char *name, void *context) {
    (void)folder;
    const char *end = strrchr(name, '.');
    bool *is_gguf = context;
    *is_gguf = *is_gguf || (end && strcmp(end, ".gguf") == 0);
    return 0;
}

/* The format of a folder or file of another program, and the remedy; NULL: not known. */
static const char *mt_foreign_format(const char *path, bool is_folder) {
    bool is_gguf = false;
    if (is_folder)
        mt_folder_visit(path, mt_note_gguf, &is_gguf);
    else
        mt_note_gguf(NULL, path, &is_gguf);
    if (is_gguf) return "has the format GGUF of llama.cpp; name the Hugging Face folder of the same model";
    if (!is_folder) return NULL;
    if (mt_folder_has(path, "consolidated.00.pth") || mt_folder_has(path, "consolidated.safetensors"))
        return "has the format of its maker (consolidated.*); name the Hugging Face folder of the same model";
    if (mt_folder_has(path, "zero_to_fp32.py"))
        return "is a checkpoint of DeepSpeed; make a Hugging Face folder of it, by its zero_to_fp32.py and "
               "save_pretrained of transformers, and name that";
    return NULL;
}

/* mt_checkpoint_locate. *lost: the folder of the latest iteration if its config.json is gone, to free. */
static char *mt_checkpoint_look(const char *folder, char **lost, mt_error *error) {
    struct stat status;
    bool found = stat(folder, &status) == 0;
    if (found && !S_ISDIR(status.st_mode) && mt_foreign_format(folder, false)) {
        mt_error_set(error, "%s: %s", folder, mt_foreign_format(folder, false));
        return NULL;
    }
    if (!found || !S_ISDIR(status.st_mode)) {
        mt_error_set(error, "%s: %s; name a folder that holds config.json, or one that --save wrote", folder,
                     found ? "is a file, not a folder" : strerror(errno));
        return NULL;
    }
    bool has_config = mt_folder_has_weights(folder);
    char *release = has_config ? NULL : mt_megatron_release(folder);
    if (release && mt_folder_is_megatron(release)) return release;
    free(release);
    if (!mt_folder_has(folder, "latest_checkpointed_iteration.txt")) {
        bool is_link = mt_is_own_link(folder, "config.json") || mt_is_own_link(folder, "adapter_config.json");
        if (has_config && !is_link) return mt_strdup(folder);
        mt_iterations found = mt_iterations_list(folder);
        free(found.numbers);
        int64_t newest = found.count > 0 ? mt_checkpoint_whole_before(folder, INT64_MAX, error) : -1;
        if (newest >= 0) return mt_iteration_path(folder, newest);
        if (found.count > 0) {
            const mt_error damage = *error;
            mt_error_set(error, "%s; no checkpoint beside it is intact: name another folder", damage.text);
            return NULL;
        }
        if (mt_link_check(folder, "config.json", error) != 0) return NULL;
        if (mt_link_check(folder, "adapter_config.json", error) != 0) return NULL;
        if (mt_link_check(folder, "latest_checkpointed_iteration.txt", error) != 0) return NULL;
        if (mt_folder_has(folder, "checksums.json") && mt_checkpoint_verify(folder, 0, error) != 0) {
            *lost = mt_strdup(folder);
            return NULL;
        }
        const char *foreign = mt_foreign_format(folder, true);
        if (foreign)
            mt_error_set(error, "%s: %s", folder, foreign);
        else
            mt_error_set(error,
                         "%s: holds neither config.json nor latest_checkpointed_iteration.txt; name a Hugging Face "
                         "folder, or one that --save wrote",
                         folder);
        return NULL;
    }
    char *path = mt_path_join(folder, "latest_checkpointed_iteration.txt");
    int64_t iteration = mt_checkpoint_latest(path, error);
    free(path);
    if (iteration < 0) return NULL;
    path = mt_iteration_path(folder, iteration);
    if (mt_folder_has_weights(path)) return path;
    if (mt_folder_has(path, "checksums.json")) {
        if (mt_checkpoint_verify(path, 0, error) == 0)
            mt_error_set(error, "%s: damaged: it has no config.json", path); // nor do its checksums name one
        *lost = path;
        return NULL;
    }
    mt_error_set(error,
                 "%s: has no config.json, but latest_checkpointed_iteration.txt beside it names iteration %lld; "
                 "write the number of a whole iter_NNNNNNN in it",
                 path, (long long)iteration);
    free(path);
    return NULL;
}

char *mt_checkpoint_locate(const char *folder, mt_error *error) {
    char *lost = NULL, *path = mt_checkpoint_look(folder, &lost, error);
    free(lost);
    return path;
}

int64_t mt_checkpoint_whole_before(const char *folder, int64_t before, mt_error *error) {
    mt_iterations found = mt_iterations_list(folder);
    int64_t number = -1;
    mt_error_set(error, "%s: holds no checkpoint; begin anew, or name another folder", folder);
    for (int64_t i = 0; i < found.count && number < 0; i++) {
        if (found.numbers[i] >= before) continue;
        char *path = mt_iteration_path(folder, found.numbers[i]);
        if (!mt_folder_has_weights(path) || !mt_folder_has(path, "trainer.json"))
            mt_error_set(error, "%s: damaged: it has no config.json or no trainer.json", path);
        else if (mt_checkpoint_verify(path, MT_VERIFY_OPTIMIZER, error) == 0)
            number = found.numbers[i];
        free(path);
    }
    free(found.numbers);
    return number;
}

bool mt_checkpoint_exists(const char *folder) {
    mt_iterations found = mt_iterations_list(folder);
    free(found.numbers);
    return found.count > 0 || mt_folder_has(folder, "latest_checkpointed_iteration.txt") ||
           mt_folder_has_weights(folder);
}

int mt_checkpoint_advise(const char *folder, mt_error *error) {
    const mt_error damage = *error;
    mt_error ignored;
    char *path = realpath(folder, NULL), *name = path ? strrchr(path, '/') : NULL; // the folder may be a link
    int64_t number = name ? mt_iteration_of(name + 1) : -1;
    if (number < 0) {
        free(path);
        return mt_error_set(error, "%s; copy the folder again from where it was saved", damage.text);
    }
    char *typed = mt_strdup(folder);
    for (size_t n = strlen(typed); n > 1 && typed[n - 1] == '/';) typed[--n] = 0;
    char *slash = strrchr(typed, '/');
    bool as_typed = mt_iteration_of(slash ? slash + 1 : typed) >= 0; // then its folder is shown as it was given
    char *parent = as_typed && slash ? typed : path;
    *strrchr(parent, '/') = 0;
    int64_t before = mt_checkpoint_whole_before(parent, number, &ignored);
    char *whole = mt_iteration_path(parent, before);
    if (before >= 0)
        mt_error_set(error, "%s; load %s, the intact checkpoint before it", damage.text, whole);
    else
        mt_error_set(error, "%s; no intact checkpoint is before it: copy its files again from a backup, or begin anew",
                     damage.text);
    free(whole), free(typed), free(path);
    return -1;
}

char *mt_checkpoint_resolve(const char *folder, mt_error *error) {
    char *damaged = NULL, *path = mt_checkpoint_look(folder, &damaged, error);
    if (path && mt_checkpoint_verify(path, 0, error) == 0) return path;
    if (path) damaged = path;
    if (damaged) mt_checkpoint_advise(damaged, error);
    free(damaged);
    return NULL;
}

char *mt_checkpoint_resolve_whole(const char *folder, mt_error *error) {
    mt_error damage;
    char *path = mt_checkpoint_locate(folder, &damage);
    if (path && mt_checkpoint_verify(path, MT_VERIFY_OPTIMIZER, &damage) == 0) return path;
    int64_t number = path && strrchr(path, '/') ? mt_iteration_of(strrchr(path, '/') + 1) : INT64_MAX;
    mt_error cause;
    int64_t before = mt_checkpoint_whole_before(folder, number < 0 ? INT64_MAX : number, &cause);
    if (path && before < 0) mt_checkpoint_advise(path, &damage);
    free(path);
    number = before;
    if (number < 0) *error = damage;
    return number < 0 ? NULL : mt_iteration_path(folder, number);
}
