/* hf_cache.c: models of the Hugging Face Hub in the local cache. Its layout (huggingface_hub, "Understand caching"):
 *
 *   models--ORG--NAME/refs/main              the hash of the commit that was downloaded last
 *   models--ORG--NAME/snapshots/HASH/FILE    links to ../../blobs/HASH
 */
#include "hf_cache.h"

#include "file.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* True for ORG/NAME of letters, digits, '-', '_' and '.', which the Hub allows. */
static bool is_model_name(const char *text) {
    static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
    size_t organisation = strspn(text, allowed);
    if (organisation == 0 || text[organisation] != '/' || text[0] == '.') return false;
    const char *name = text + organisation + 1;
    return *name && *name != '.' && strspn(name, allowed) == strlen(name);
}

/* The cache's folder, to free. */
static char *cache_folder(void) {
    const char *cache = getenv("HF_HUB_CACHE"), *home = getenv("HF_HOME"), *user = getenv("HOME");
    const char *caches = getenv("XDG_CACHE_HOME");
    if (cache && *cache) return mt_strdup(cache);
    if (home && *home) return mt_path_join(home, "hub");
    if (caches && *caches) return mt_path_join(caches, "huggingface/hub");
    return mt_path_join(user ? user : "", ".cache/huggingface/hub");
}

/* CACHE/models--ORG--NAME, to free. */
static char *model_folder(const char *cache, const char *name) {
    int organisation = (int)strcspn(name, "/");
    int64_t room = (int64_t)(strlen(cache) + strlen(name)) + 16;
    char *folder = mt_malloc(room);
    snprintf(folder, (size_t)room, "%s/models--%.*s--%s", cache, organisation, name, name + organisation + 1);
    return folder;
}

/* The snapshot that refs/main names, to free; NULL if there is none. */
static char *main_snapshot(const char *folder) {
    int64_t bytes;
    mt_error ignored;
    char *reference = mt_path_join(folder, "refs/main"), *hash = mt_file_read(reference, 256, &bytes, &ignored);
    char *snapshots = mt_path_join(folder, "snapshots"), *snapshot = NULL;
    if (hash) hash[strspn(hash, "0123456789abcdef")] = '\0';
    if (hash && *hash && mt_folder_has(snapshots, hash)) snapshot = mt_path_join(snapshots, hash);
    free(reference), free(hash), free(snapshots);
    return snapshot;
}

int mt_hf_cache_find(char **path, const char *file, const char *option, mt_error *error) {
    struct stat status;
    if (!*path || !is_model_name(*path) || lstat(*path, &status) == 0) return 0;
    char *cache = cache_folder(), *folder = model_folder(cache, *path), *snapshot = main_snapshot(folder);
    int result = 0;
    if (!snapshot)
        result = mt_error_set(error,
                              "%s %s: no such file or folder, and the Hugging Face cache (%s) has no model of this "
                              "name; check the path, or, for a model of the Hub, run: hf download %s",
                              option, *path, cache, *path);
    else if (file && !mt_folder_has(snapshot, file))
        result = mt_error_set(error, "%s %s: the Hugging Face cache has the model without %s (%s); run: hf download %s",
                              option, *path, file, snapshot, *path);
    if (result == 0) {
        free(*path);
        *path = file ? mt_path_join(snapshot, file) : mt_strdup(snapshot);
    }
    free(cache), free(folder), free(snapshot);
    return result;
}
