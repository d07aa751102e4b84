/* Crash tests of saving, after SQLite's: three saves are recorded call by call, and after every call the disk is
 * rebuilt as a killed process or a power loss could have left it; then every call is made to fail, or to do nothing and
 * succeed. Each time a whole checkpoint must load: the one before, or the new one.
 *
 * Runs on one rank, or under mpirun on more (test_crash.sh), where one of eight writes fails; MT_CRASH_ALL=1: all. */
#include "../data/base/file.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/checkpoint/checkpoint_folder.h"
#include "../data/checkpoint/checkpoint_load.h"
#include "../data/checkpoint/checkpoint_save.h"
#include "../data/checkpoint/run_options.h"
#include "crash_shim.h"
#include "new_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- the disk: files, folders and links, each as it is now and as a power loss leaves it */

enum { MAX_NAMES = 48, MAX_PENDING = 256 };

typedef struct node node;
typedef struct names {
    int64_t count;
    struct {
        char name[96];
        node *node;
    } at[MAX_NAMES];
} names;

struct node {
    char kind; // 'f'ile, 'd' folder, 'l'ink
    char target[256];
    char *data, *safe; // contents now, and at the last fsync
    int64_t size, safe_size;
    names now, synced; // entries now, and at the last fsync
    node *next;        // of all nodes
};

/* A change of names that no fsync of its folder has brought to the disk. */
typedef struct pending {
    crash_op op;
    const char *path, *other; // in the record
    node *node, *folder;      // the new entry's, and its folder
} pending;

typedef struct disk {
    node *root, *all;
    int64_t prefix; // bytes of the root's path
    pending pending[MAX_PENDING];
    int64_t num_pending;
} disk;

static node *node_create(disk *d, char kind) {
    node *n = mt_calloc(sizeof *n);
    n->kind = kind, n->next = d->all;
    return d->all = n;
}

static void disk_free(disk *d) {
    for (node *n = d->all, *next; n; n = next) {
        next = n->next;
        free(n->data), free(n->safe), free(n);
    }
}

static int64_t names_find(const names *list, const char *name) {
    for (int64_t i = 0; i < list->count; i++)
        if (strcmp(list->at[i].name, name) == 0) return i;
    return -1;
}

static void names_set(names *list, const char *name, node *n) {
    int64_t i = names_find(list, name);
    if (i < 0) i = list->count++;
    MT_CHECK(list->count <= MAX_NAMES && strlen(name) < sizeof list->at[0].name);
    strcpy(list->at[i].name, name);
    list->at[i].node = n;
}

static void names_remove(names *list, const char *name) {
    int64_t i = names_find(list, name);
    if (i >= 0) list->at[i] = list->at[--list->count];
}

/* The folder of a path and its last name; NULL if there is no such folder. */
static node *disk_folder(const disk *d, const char *path, char last[96]) {
    node *folder = d->root;
    const char *from = path + d->prefix;
    for (const char *slash; *from == '/'; from = slash) {
        slash = strchr(++from, '/');
        snprintf(last, 96, "%.*s", slash ? (int)(slash - from) : (int)strlen(from), from);
        if (!slash) return folder;
        int64_t i = names_find(&folder->now, last);
        if (i < 0 || folder->now.at[i].node->kind != 'd') return NULL;
        folder = folder->now.at[i].node;
    }
    return NULL;
}

static node *disk_find(const disk *d, const char *path) {
    char last[96];
    if (!path[d->prefix]) return d->root;
    node *folder = disk_folder(d, path, last);
    int64_t i = folder ? names_find(&folder->now, last) : -1;
    return i < 0 ? NULL : folder->now.at[i].node;
}

/* Changes the names of an operation, if the disk has its source; `n` is the node of a new entry. */
static void disk_change_names(disk *d, const crash_op *op, const char *path, const char *other, node *n) {
    char name[96], other_name[96];
    node *folder = disk_folder(d, path, name), *old = disk_find(d, path);
    if (!folder) return;
    if (op->kind == CRASH_UNLINK) {
        names_remove(&folder->now, name);
    } else if (op->kind == CRASH_RENAME) {
        node *to = disk_folder(d, other, other_name), *replaced = disk_find(d, other);
        if (!old || !to || (op->value && !replaced)) return;
        names_remove(&folder->now, name);
        names_set(&to->now, other_name, old);
        if (op->value) names_set(&folder->now, name, replaced);
    } else {
        names_set(&folder->now, name, n);
    }
}

static void node_resize(node *n, int64_t size) {
    n->data = mt_realloc(n->data, mt_max(size, 1));
    if (size > n->size) memset(n->data + n->size, 0, (size_t)(size - n->size));
    n->size = size;
}

static void disk_sync(disk *d, node *n) {
    n->safe = mt_realloc(n->safe, mt_max(n->size, 1));
    if (n->size > 0) memcpy(n->safe, n->data, (size_t)n->size);
    n->safe_size = n->size;
    n->synced = n->now;
    int64_t kept = 0;
    for (int64_t i = 0; i < d->num_pending; i++)
        if (d->pending[i].folder != n) d->pending[kept++] = d->pending[i];
    d->num_pending = kept;
}

/* Applies one recorded call. */
static void disk_apply(disk *d, const crash_op *op, const char *path, const char *other, const char *data) {
    char last[96];
    node *n = op->kind == CRASH_MARK ? NULL : disk_find(d, path);
    if (op->kind == CRASH_MARK) return;
    if (op->kind == CRASH_SYNC) {
        if (n) disk_sync(d, n);
    } else if (op->kind == CRASH_WRITE || op->kind == CRASH_FLUSH || op->kind == CRASH_RESERVE) {
        MT_CHECK(n);
        int64_t end = op->kind == CRASH_RESERVE ? op->value : op->value + op->data_bytes;
        node_resize(n, op->kind == CRASH_FLUSH ? end : mt_max(n->size, end));
        if (op->data_bytes > 0) memcpy(n->data + op->value, data, (size_t)op->data_bytes);
    } else if (op->kind == CRASH_OPEN && n) {
        if (op->value) node_resize(n, 0);
    } else {
        if (op->kind == CRASH_OPEN) n = node_create(d, 'f');
        if (op->kind == CRASH_MKDIR) n = node_create(d, 'd');
        if (op->kind == CRASH_LINK) snprintf((n = node_create(d, 'l'))->target, sizeof n->target, "%s", other);
        MT_CHECK(d->num_pending < MAX_PENDING);
        d->pending[d->num_pending++] = (pending){*op, path, other, n, disk_folder(d, path, last)};
        disk_change_names(d, op, path, other, n);
    }
}

/* The node as the disk has it, copied into another disk. Contents without an fsync are missing: the file is empty, or
 * with `zeros` full of zeros. */
static node *node_copy_safe(disk *to, const node *from, bool zeros) {
    node *n = node_create(to, from->kind);
    strcpy(n->target, from->target);
    if (from->kind == 'f') {
        node_resize(n, from->safe ? from->safe_size : zeros ? from->size : 0);
        if (from->safe && from->safe_size > 0) memcpy(n->data, from->safe, (size_t)from->safe_size);
    }
    for (int64_t i = 0; i < from->synced.count; i++)
        names_set(&n->now, from->synced.at[i].name, node_copy_safe(to, from->synced.at[i].node, zeros));
    return n;
}

/* The disk after a power loss: what was synced, and the changes of names that were not, except number `without`. */
static disk disk_after_loss(const disk *from, bool none, int64_t without, bool zeros) {
    disk d = {.prefix = from->prefix};
    d.root = node_copy_safe(&d, from->root, zeros);
    for (int64_t i = 0; i < from->num_pending && !none; i++) {
        const pending *p = &from->pending[i];
        bool creates = p->op.kind != CRASH_UNLINK && p->op.kind != CRASH_RENAME;
        node *n = creates ? node_copy_safe(&d, p->node, zeros) : NULL;
        if (i != without) disk_change_names(&d, &p->op, p->path, p->other, n);
    }
    return d;
}

static uint64_t hash_add(uint64_t hash, const void *data, int64_t bytes) {
    const unsigned char *from = data;
    while (bytes-- > 0) hash = (hash ^ *from++) * UINT64_C(1099511628211);
    return hash;
}

/* Temporary files do not count: nothing reads them. */
static uint64_t node_hash(const node *n) {
    uint64_t hash = hash_add((unsigned char)n->kind, n->target, (int64_t)strlen(n->target)), sum = 0;
    hash = hash_add(hash, n->data, n->size);
    for (int64_t i = 0; i < n->now.count; i++) {
        const char *name = n->now.at[i].name;
        if (strstr(name, ".tmp-")) continue;
        uint64_t below = node_hash(n->now.at[i].node); // in any order
        sum += hash_add(below, name, (int64_t)strlen(name));
    }
    return hash * 31 + sum;
}

static void node_write(const node *n, const char *path) {
    if (n->kind == 'd') {
        MT_CHECK(mkdir(path, 0700) == 0);
        for (int64_t i = 0; i < n->now.count; i++) {
            char *below = mt_path_join(path, n->now.at[i].name);
            node_write(n->now.at[i].node, below);
            free(below);
        }
    } else if (n->kind == 'l') {
        MT_CHECK(symlink(n->target, path) == 0);
    } else {
        int descriptor = open(path, O_CREAT | O_WRONLY | O_EXCL, 0600);
        MT_CHECK(descriptor >= 0 && write(descriptor, n->data, (size_t)n->size) == n->size && close(descriptor) == 0);
    }
}

static int remove_entry(const char *path, const struct stat *status, int type, struct FTW *walk) {
    (void)status, (void)type, (void)walk;
    return remove(path);
}

/* ---- the run */

typedef struct run {
    mt_run_options options;
    mt_grid grid;
    mt_model *model;
    char work[64], watched[300], save[320], state[300]; // folders: of the saves; of states that are tried
    int silent;                                         // a descriptor in place of standard error
    int64_t failures, states, points;
} run;

/* A generation is one save; its number is in every value and in consumed_train_samples. */
enum { GENERATIONS = 3 };
static const int64_t iterations[GENERATIONS + 1] = {0, 2, 4, 4};

static void complain(run *r, const char *name, const char *what) {
    if (r->grid.world.rank == 0 && r->failures++ < 10) printf("%s: %s\n", name, what);
}

static void create(run *r) {
    static const char *arguments[] = {"train",
                                      "--num-layers",
                                      "1",
                                      "--hidden-size",
                                      "16",
                                      "--num-attention-heads",
                                      "2",
                                      "--max-position-embeddings",
                                      "16",
                                      "--vocab-size",
                                      "32",
                                      "--seq-length",
                                      "16",
                                      "--mock-data",
                                      "--micro-batch-size",
                                      "1",
                                      "--global-batch-size",
                                      "4",
                                      "--lr",
                                      "1e-3",
                                      "--train-iters",
                                      "10",
                                      "--device",
                                      "cpu"};
    mt_error error;
    mt_model_plan plan = {.max_tokens = 16, .max_logits = 16, .max_position = 16, .train = true};
    int count = sizeof arguments / sizeof *arguments;
    if (mt_options_parse(&r->options, MT_PROGRAM_TRAIN, count, (char **)arguments, &error) != 0 ||
        mt_options_finish(&r->options, MT_PROGRAM_TRAIN, r->grid.world.size, &error) != 0 ||
        mt_grid_build(&r->grid, &r->options.stack, &error) != 0 ||
        mt_model_create(&r->model, &r->options.stack, &r->grid, &mt_cpu_ops, &plan, &error) != 0)
        mt_die("%s", error.text);
    r->options.load = r->options.save = NULL;
}

/* Every value of every state; padding rows stay 0. */
static void fill(run *r, float value) {
    int64_t num_params, num_buckets;
    const mt_param *params = mt_model_params(r->model, &num_params);
    mt_bucket *buckets = mt_model_buckets(r->model, &num_buckets);
    for (int64_t i = 0; i < num_params; i++) {
        mt_bucket *b = &buckets[params[i].bucket];
        float *states[] = {b->params, b->m, b->v};
        for (int k = 0; k < 3; k++)
            for (int64_t e = 0; e < mt_param_rows_stored(&params[i]) * params[i].cols; e++)
                states[k][params[i].offset + e] = value;
    }
}

static bool is_filled(run *r, float value) {
    int64_t num_params, num_buckets;
    const mt_param *params = mt_model_params(r->model, &num_params);
    mt_bucket *buckets = mt_model_buckets(r->model, &num_buckets);
    double wrong = 0;
    for (int64_t i = 0; i < num_params; i++) {
        mt_bucket *b = &buckets[params[i].bucket];
        float *states[] = {b->params, b->m, b->v};
        for (int k = 0; k < 3; k++)
            for (int64_t e = 0; e < mt_param_rows_stored(&params[i]) * params[i].cols; e++)
                wrong += states[k][params[i].offset + e] != value;
    }
    mt_all_reduce_max(&r->grid.world, &wrong, 1, MT_F64);
    return wrong == 0;
}

static int add_tokenizer(void *context, const char *folder, mt_error *error) {
    (void)context;
    char *path = mt_path_join(folder, "tokenizer.json");
    int status = mt_file_write(path, "{}\n", 3, NULL, error);
    free(path);
    return status;
}

static int save(run *r, int64_t generation, mt_error *error) {
    mt_run_state state = {.iteration = iterations[generation], .consumed_train_samples = generation};
    fill(r, (float)generation);
    r->options.save = r->save;
    int status = mt_checkpoint_save(r->model, &r->options, &state, r->save, add_tokenizer, NULL, error);
    r->options.save = NULL;
    return status;
}

/* Standard error is for unexpected messages; these are expected. */
static void silence(run *r, bool on) {
    static int before = -1;
    if (on) fflush(stderr), before = dup(2), dup2(r->silent, 2);
    if (!on) fflush(stderr), dup2(before, 2), close(before);
}

/* Loads a folder as a run that resumes does. The generation must be one of [low, high]; without one, 0, the folder may
 * also hold no checkpoint. Returns the fault in a few words, or NULL. Every rank calls it. */
static const char *try_load(run *r, const char *folder, int64_t low, int64_t high) {
    static char fault[700];
    mt_error error;
    mt_run_state state;
    if (low == 0 && !mt_checkpoint_exists(folder)) return NULL;
    r->options.load = r->options.save = (char *)folder;
    fill(r, -1);
    silence(r, true);
    int status = mt_checkpoint_load(r->model, &r->options, &state, folder, &error);
    silence(r, false);
    r->options.load = r->options.save = NULL;
    int64_t found = state.consumed_train_samples;
    if (status != 0)
        snprintf(fault, sizeof fault, "no checkpoint loads: %.500s", error.text);
    else if (found < mt_max(low, 1) || found > high)
        snprintf(fault, sizeof fault, "save %lld came back, not one of %lld to %lld", (long long)found, (long long)low,
                 (long long)high);
    else if (state.iteration != iterations[found] || !is_filled(r, (float)found))
        snprintf(fault, sizeof fault, "the iteration or the values are not those of save %lld", (long long)found);
    else
        return NULL;
    return fault;
}

/* ---- crashes and power losses: from the record of three saves */

typedef struct trial {
    bool goes_on;
    int64_t low, high, call;
    char name[128];
} trial;

/* Ranks follow rank 0. Returns false at the end. */
static bool try_state(run *r, trial *t) {
    mt_broadcast(&r->grid.world, t, sizeof *t, 0);
    if (!t->goes_on) return false;
    char *folder = mt_path_join(r->state, "save");
    const char *fault = try_load(r, folder, t->low, t->high);
    if (fault) complain(r, t->name, fault);
    mt_barrier(&r->grid.world);
    free(folder);
    return true;
}

static void try_disk(run *r, const disk *d, trial t, const char *kind) {
    static uint64_t seen[1 << 16];
    static int64_t num_seen;
    uint64_t hash = node_hash(d->root) * 31 + (uint64_t)(t.low * 7 + t.high);
    r->states++;
    for (int64_t i = 0; i < num_seen; i++)
        if (seen[i] == hash) return;
    MT_CHECK(num_seen < 1 << 16);
    seen[num_seen++] = hash;
    r->points++;
    nftw(r->state, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    node_write(d->root, r->state);
    snprintf(t.name, sizeof t.name, "after call %lld, %s", (long long)t.call, kind);
    try_state(r, &t);
}

/* The states in which a crash may leave the disk after the calls so far. */
static void try_crashes(run *r, const disk *d, trial t) {
    try_disk(r, d, t, "killed");
    for (int zeros = 0; zeros < 2; zeros++) {
        disk none = disk_after_loss(d, true, -1, zeros), all = disk_after_loss(d, false, -1, zeros);
        try_disk(r, &none, t, "power lost: only what was synced");
        try_disk(r, &all, t, "power lost: all names, contents that were synced");
        disk_free(&none), disk_free(&all);
    }
    for (int64_t i = 0; i < d->num_pending; i++) {
        char kind[128];
        disk but_one = disk_after_loss(d, false, i, false);
        snprintf(kind, sizeof kind, "power lost: all names but the %s of %s", crash_kind_names[d->pending[i].op.kind],
                 d->pending[i].path + d->prefix + 1);
        try_disk(r, &but_one, t, kind);
        disk_free(&but_one);
    }
}

static const crash_op *record_next(const char **from, const char **path, const char **other, const char **data) {
    if (*from == crash->log + crash->used) return NULL;
    const crash_op *op = (const crash_op *)(const void *)*from;
    *path = *from + sizeof *op;
    *other = *path + op->path_bytes;
    *data = *other + op->other_bytes;
    *from += op->size;
    return op;
}

static void replay(run *r) {
    disk d = {.prefix = (int64_t)strlen(r->watched)};
    d.root = node_create(&d, 'd');
    const char *from = crash->log, *path, *other, *data;
    trial t = {.goes_on = true, .low = 0, .high = 1};
    try_crashes(r, &d, t);
    for (const crash_op *op; (op = record_next(&from, &path, &other, &data));) {
        disk_apply(&d, op, path, other, data);
        if (op->kind == CRASH_MARK) t.low = op->value, t.high = op->value + 1;
        t.call += op->kind != CRASH_MARK;
        try_crashes(r, &d, t);
    }
    disk_free(&d);
    try_state(r, &(trial){.goes_on = false});
    printf("%lld calls of three saves, %lld states of the disk after them, %lld of them different\n", (long long)t.call,
           (long long)r->states, (long long)r->points);
}

static void every_crash_leaves_a_whole_checkpoint(run *r) {
    mt_error error;
    trial t;
    r->options.keep_checkpoints = 1;
    if (r->grid.world.rank == 0) crash_begin(CRASH_RECORD, -1, -1, EIO);
    mt_barrier(&r->grid.world);
    for (int64_t generation = 1; generation <= GENERATIONS; generation++) {
        if (save(r, generation, &error) != 0) mt_die("%s", error.text);
        if (r->grid.world.rank == 0) crash_mark(generation);
    }
    mt_barrier(&r->grid.world);
    if (r->grid.world.rank == 0) crash_end();
    if (r->grid.world.rank == 0)
        replay(r);
    else
        while (try_state(r, &t)) continue;
}

/* ---- calls that fail, or that do nothing and succeed */

/* The folder after the first save, without the ones before. */
static void begin_again(run *r) {
    mt_error error;
    if (r->grid.world.rank == 0) nftw(r->save, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    mt_barrier(&r->grid.world);
    if (save(r, 1, &error) != 0) mt_die("%s", error.text);
}

/* One save, whose call `at` of a kind is failed or dropped. Returns false if there were fewer calls. */
static bool try_fault(run *r, crash_how how, int64_t kind, int64_t at, int error_number) {
    mt_error error = {{0}};
    const char *fault = NULL;
    char name[128];
    begin_again(r);
    mt_barrier(&r->grid.world);
    if (r->grid.world.rank == 0) crash_begin(how, kind, at, error_number);
    mt_barrier(&r->grid.world);
    silence(r, true);
    int status = save(r, 2, &error);
    silence(r, false);
    mt_barrier(&r->grid.world);
    int64_t hit = crash->hit;
    mt_barrier(&r->grid.world);
    if (r->grid.world.rank == 0) crash_end();
    mt_barrier(&r->grid.world);
    snprintf(name, sizeof name, "%s number %lld: %s", crash_kind_names[kind], (long long)at,
             how == CRASH_DROP ? "dropped" : strerror(error_number));
    if (status != 0 && (!error.text[0] || strchr(error.text, '\n') || !strstr(error.text, r->work)))
        fault = "the error is no line that names the file";
    if (!fault) fault = try_load(r, r->save, status == 0 && how != CRASH_DROP ? 2 : 1, 2);
    if (fault) complain(r, name, fault);
    r->points += hit >= 0;
    return hit >= 0;
}

static void every_fault_leaves_a_whole_checkpoint(run *r) {
    static const struct {
        crash_how how;
        int error_number;
        int64_t keep; // with one checkpoint only, a disk that lies would lose it
    } faults[] = {{CRASH_FAIL, EIO, 1}, {CRASH_FAIL, ENOSPC, 0}, {CRASH_DROP, EIO, 0}};
    int64_t kinds[CRASH_NUM_KINDS] = {0}, step = r->grid.world.size > 1 && !getenv("MT_CRASH_ALL") ? 8 : 1;
    r->points = 0;
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        r->options.keep_checkpoints = faults[i].keep;
        for (int64_t kind = 0; kind < CRASH_NUM_KINDS; kind++)
            for (int64_t at = 0; try_fault(r, faults[i].how, kind, at, faults[i].error_number); kinds[kind]++)
                at += kind == CRASH_WRITE ? step : 1;
    }
    if (r->grid.world.rank != 0) return;
    printf("%lld calls failed or dropped:", (long long)r->points);
    for (int k = 0; k < CRASH_NUM_KINDS; k++) {
        printf("%s %lld %s", k ? "," : "", (long long)kinds[k], crash_kind_names[k]);
        if (kinds[k] == 0) complain(r, crash_kind_names[k], "no such call was tried");
    }
    printf("\n");
}

/* ---- main */

static void test(run *r, const char *name, void (*body)(run *)) {
    r->failures = r->states = r->points = 0;
    double began = mt_time();
    body(r);
    if (r->grid.world.rank == 0)
        printf("%s %s on %d rank%s (%.1f s)\n", r->failures ? "not ok" : "ok", name, r->grid.world.size,
               r->grid.world.size > 1 ? "s" : "", mt_time() - began);
}

int main(int argc, char **argv) {
    static run r;
    mt_grid_start(&r.grid, &argc, &argv);
    create(&r);
    MT_CHECK(r.grid.world.rank != 0 || new_folder(r.work) == 0);
    mt_broadcast(&r.grid.world, r.work, sizeof r.work, 0);
    snprintf(r.watched, sizeof r.watched, "%s/watched", r.work);
    snprintf(r.save, sizeof r.save, "%s/save", r.watched);
    snprintf(r.state, sizeof r.state, "%s/state", r.work);
    r.silent = open("/dev/null", O_WRONLY);
    if (r.grid.world.rank == 0) MT_CHECK(mkdir(r.watched, 0700) == 0);
    mt_barrier(&r.grid.world);
    char *shared = mt_path_join(r.work, "shared");
    MT_CHECK(crash_open(shared, r.watched) == 0);
    mt_barrier(&r.grid.world);
    int64_t failures = 0;
    test(&r, "every crash and power loss leaves a whole checkpoint", every_crash_leaves_a_whole_checkpoint);
    failures += r.failures;
    test(&r, "every fault leaves a whole checkpoint", every_fault_leaves_a_whole_checkpoint);
    failures += r.failures;
    if (r.grid.world.rank == 0) nftw(r.work, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
    free(shared);
    mt_model_destroy(r.model);
    mt_options_free(&r.options);
    mt_grid_stop(&r.grid);
    return failures > 0;
}
