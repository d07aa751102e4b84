/* checkpoint_load.c: from a folder's tensors into a model's buckets, and back to where a run left off. Each row of the
 * parameter table says which rows of which tensor it is. Invariants: everything is checked, by every rank, before
 * anything is set; a tensor that no row wants is refused unless it is known to carry nothing. */
#include "checkpoint_internal.h"

#include "prompts.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- which tensors a model takes */

/* out[i * out_stride] = element i of stored numbers, i < n; `in` need not be aligned. */
static void mt_stored_to_f32(float *out, int64_t out_stride, const void *in, mt_dtype dtype, int64_t n) {
    const char *from = in;
    if (dtype == MT_F32 && out_stride == 1) {
        memcpy(out, in, (size_t)n * sizeof *out);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        uint16_t bits;
        double wide;
        float *to = &out[i * out_stride];
        if (dtype == MT_F32) {
            memcpy(to, from + i * 4, sizeof *to);
        } else if (dtype == MT_F64) {
            memcpy(&wide, from + i * 8, sizeof wide);
            *to = (float)wide;
        } else {
            memcpy(&bits, from + i * 2, sizeof bits);
            *to = dtype == MT_BF16 ? mt_bf16_to_f32(bits) : mt_f16_to_f32(bits);
        }
    }
}

const char *const mt_state_prefix[MT_NUM_STATES] = {"", "master.", "exp_avg.", "exp_avg_sq."};

/* Of values[n], which belong at `at` of a bucket, those in a part that are not finite. */
static int64_t mt_count_not_finite(const mt_part *part, int64_t at, const float *values, int64_t n) {
    int64_t count = 0, end = mt_min(n, part->first + part->count - at);
    for (int64_t i = mt_max(part->first - at, 0); i < end; i++) count += !isfinite(values[i]);
    return count;
}

int64_t mt_param_shape(const mt_param *param, int64_t shape[2]) {
    shape[0] = param->hf_transposed ? param->whole_cols : param->hf_rows_total;
    shape[1] = param->hf_transposed ? param->hf_rows_total : param->whole_cols;
    return param->is_vector ? 1 : 2;
}

static const char *mt_shape_print(char out[256], const int64_t *shape, int64_t num_dims) {
    int used = snprintf(out, 256, "[");
    for (int64_t i = 0; i < num_dims; i++)
        used += snprintf(out + used, 256 - (size_t)used, "%s%lld", i ? ", " : "", (long long)shape[i]);
    snprintf(out + used, 256 - (size_t)used, "]");
    return out;
}

/* A tensor that a parameter is to be read from must have its shape and be of floating point. */
static int mt_param_check(const mt_param *param, const mt_tensor_info *tensor, mt_error *error) {
    int64_t shape[2], num_dims = mt_param_shape(param, shape);
    char found[256], expected[256];
    const char *rows_option = param->rows_option ? param->rows_option : param->exists_option;
    if (tensor->dtype != MT_F32 && tensor->dtype != MT_BF16 && tensor->dtype != MT_F16 && tensor->dtype != MT_F64)
        return mt_error_set(error,
                            "%s: tensor \"%s\" is %s; weights may be F32, BF16, F16 or F64, so take a checkpoint "
                            "that is not quantized",
                            tensor->file, tensor->name, mt_dtype_name(tensor->dtype));
    if (tensor->num_dims == num_dims && memcmp(shape, tensor->shape, (size_t)num_dims * sizeof *shape) == 0) return 0;
    bool cols_differ =
        tensor->num_dims == 2 && num_dims == 2 && tensor->shape[!param->hf_transposed] != param->whole_cols;
    return mt_error_set(error, "%s: tensor \"%s\" is %s and the model's %s; check %s or config.json", tensor->file,
                        tensor->name, mt_shape_print(found, tensor->shape, tensor->num_dims),
                        mt_shape_print(expected, shape, num_dims), cols_differ ? param->cols_option : rows_option);
}

/* The tensor of a name in the table; a model saved without its head has names without their first word. */
static const mt_tensor_info *mt_safetensors_find_param(const mt_safetensors *file, const char *name) {
    static const char *const prefixes[] = {"model.", "transformer."};
    const mt_tensor_info *tensor = mt_safetensors_find(file, name);
    for (int i = 0; !tensor && i < 2; i++)
        if (strncmp(name, prefixes[i], strlen(prefixes[i])) == 0)
            tensor = mt_safetensors_find(file, name + strlen(prefixes[i]));
    return tensor;
}

static int mt_param_missing(const mt_param *param, const mt_options *options, const char *folder,
                            const mt_safetensors *file, mt_error *error) {
    const char *option = param->exists_option;
    if (param->role == MT_LM_HEAD)
        return mt_error_set(error,
                            "%s: has no tensor \"%s\"; if the model is tied, set tie_word_embeddings in config.json to "
                            "true, or leave out %s",
                            folder, param->hf_name, option);
    if (param->layer >= options->num_layers)
        return mt_error_set(error,
                            "%s: has no tensor \"%s\" of a module of multi-token prediction among its %lld; lower "
                            "--mtp-num-layers to the modules that it holds, perhaps 0",
                            folder, param->hf_name, (long long)mt_safetensors_count(file));
    return mt_error_set(error, "%s: has no tensor \"%s\" among its %lld; check config.json, --num-layers%s%s", folder,
                        param->hf_name, (long long)mt_safetensors_count(file), option ? " and " : "",
                        option ? option : "");
}

/* The number of a tensor's layer, or -1; `rest` is what follows it in the name. */
static int64_t mt_tensor_layer(const char *name, const char **rest) {
    char *end;
    if (strncmp(name, "model.", 6) == 0) name += 6;
    if (strncmp(name, "layers.", 7) != 0 || !isdigit((unsigned char)name[7])) return -1;
    errno = 0;
    int64_t layer = strtoll(name + 7, &end, 10);
    *rest = end + (*end == '.');
    return *end == '.' && errno == 0 ? layer : -1;
}

/* DeepSeek's folders have the embedding and the output layer again in every module of multi-token prediction, which
 * shares them with the model: the name of what such a tensor repeats, or NULL. */
static const char *mt_tensor_repeats(const mt_options *options, const char *name) {
    const char *rest;
    int64_t module = mt_tensor_layer(name, &rest) - options->num_layers;
    if (module < 0 || module >= options->mtp_num_layers) return NULL;
    if (strcmp(rest, "embed_tokens.weight") == 0) return "model.embed_tokens.weight";
    if (strcmp(rest, "shared_head.head.weight") != 0) return NULL;
    return options->untie_embeddings_and_output_weights ? "lm_head.weight" : "model.embed_tokens.weight";
}

/* It must be the same, or training would lose it. */
static int mt_tensor_check_repeated(const mt_options *options, const mt_safetensors *file, const mt_tensor_info *tensor,
                                    mt_error *error) {
    const char *name = mt_tensor_repeats(options, tensor->name);
    const mt_tensor_info *shared = name ? mt_safetensors_find_param(file, name) : NULL;
    if (!shared) return 0;
    if (shared->dtype == tensor->dtype && shared->bytes == tensor->bytes &&
        memcmp(shared->data, tensor->data, (size_t)tensor->bytes) == 0)
        return 0;
    return mt_error_set(error,
                        "%s: tensor \"%s\" is not the same as \"%s\", which modules of multi-token prediction share; "
                        "load with --mtp-num-layers 0",
                        tensor->file, tensor->name, shared->name);
}

/* Tensors that old checkpoints carry and that hold no weights: tables that are computed, masks, the tied head; and
 * modules of multi-token prediction that the model does without. */
static bool mt_tensor_is_harmless(const mt_options *options, const char *name) {
    const char *rest;
    int64_t layer = mt_tensor_layer(name, &rest), end = options->num_layers + options->mtp_layers_stored;
    if (layer >= options->num_layers + options->mtp_num_layers && layer < end) return true;
    if (mt_tensor_repeats(options, name)) return true;
    if (mt_text_ends_with(name, "rotary_emb.inv_freq") || mt_text_ends_with(name, ".attn.masked_bias")) return true;
    if (options->hf_family == MT_HF_GPT2 && mt_text_ends_with(name, ".attn.bias")) return true;
    return !options->untie_embeddings_and_output_weights && strcmp(name, "lm_head.weight") == 0;
}

static int mt_tensor_pointer_compare(const void *a, const void *b) {
    const mt_tensor_info *x = *(const mt_tensor_info *const *)a, *y = *(const mt_tensor_info *const *)b;
    return (x > y) - (x < y);
}

/* Every tensor must be wanted by a row: a weight that is silently left out would give another model. */
static int mt_weights_check_unused(const mt_param *rows, int64_t count, const mt_options *options,
                                   const mt_safetensors *file, mt_error *error) {
    const mt_tensor_info **used = mt_malloc(count * (int64_t)sizeof *used), *unused = NULL;
    for (int64_t i = 0; i < count; i++) used[i] = mt_safetensors_find_param(file, rows[i].hf_name);
    qsort(used, (size_t)count, sizeof *used, mt_tensor_pointer_compare);
    for (int64_t i = 0; i < mt_safetensors_count(file) && !unused; i++) {
        const mt_tensor_info *tensor = mt_safetensors_get(file, i);
        if (mt_tensor_is_harmless(options, tensor->name)) continue;
        if (!bsearch(&tensor, used, (size_t)count, sizeof *used, mt_tensor_pointer_compare)) unused = tensor;
    }
    free(used);
    if (!unused) return 0;
    return mt_error_set(error,
                        "%s: tensor \"%.120s\" has no place in the model that the options describe; check "
                        "config.json, --num-layers and the options for biases and norms",
                        unused->file, unused->name);
}

/* A folder's tensors against the whole model's table, so that every rank finds the same. */
static int mt_weights_check(const mt_options *options, const char *folder, const mt_safetensors *file,
                            mt_error *error) {
    mt_param *rows;
    int64_t count = mt_params_build(&rows, options, NULL);
    int status = 0;
    for (int64_t i = 0; i < count && status == 0; i++) {
        const mt_tensor_info *tensor = mt_safetensors_find_param(file, rows[i].hf_name);
        status =
            tensor ? mt_param_check(&rows[i], tensor, error) : mt_param_missing(&rows[i], options, folder, file, error);
    }
    if (status == 0) status = mt_weights_check_unused(rows, count, options, file, error);
    for (int64_t i = 0; i < mt_safetensors_count(file) && status == 0; i++)
        status = mt_tensor_check_repeated(options, file, mt_safetensors_get(file, i), error);
    free(rows);
    return status;
}

/* ---- reading a folder's files: each byte once for all ranks of a host, and checked against its sum */

char *mt_align_direct(char *memory) {
    return memory + (-(uintptr_t)memory & (MT_DIRECT - 1));
}

int mt_open_direct(const char *path, int flags) {
#ifdef O_DIRECT
    return open(path, flags | O_DIRECT | O_CLOEXEC);
#else
    (void)path, (void)flags;
    return -1;
#endif
}

/* What a parameter takes from a tensor: into the parts of its bucket, of the model's type and of floats, either of
 * which may have no data. */
typedef struct mt_wanted {
    const mt_param *param;
    const mt_tensor_info *tensor;
    mt_part weights, floats;
    float *turned;      // all that lies here, while a transposed tensor passes by
    int64_t not_finite; // of the weights
} mt_wanted;

/* Files pass by in stretches, through slots of memory that all ranks of a host share. Threads of all ranks read the
 * next stretch, whoever is free; a slot is free again when every rank has taken from it what it wants. Who waits
 * sleeps: cores may be fewer than ranks and their threads. */
enum { MT_STRETCH = 2 << 20, MT_SLOTS = 12, MT_READERS = 4, MT_STAGED = 1 << 18, MT_SPARES = 8 };

/* At the start of the shared memory. */
typedef struct mt_slots {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int64_t claimed;         // stretches of the file that a thread has gone for
    int64_t ready[MT_SLOTS]; // 1 + the stretch that lies there
    int64_t taken[MT_SLOTS]; // ranks that are done with it
    int64_t uses[MT_SLOTS];  // stretches that all ranks are done with
} mt_slots;

typedef struct mt_reader {
    mt_model *model;
    const mt_checksums *sums; // what they are checked against; NULL: nothing
    mt_host_memory shared;    // of the ranks of a host: slots, then window
    char *window;             // [MT_SLOTS, MT_STRETCH]
    mt_slots *slots;
    float *spare[MT_SPARES]; // what tensors were turned in
    int64_t spare_bytes[MT_SPARES];
    unsigned next_spare;
    float *staged; // numbers on their way into a bucket
    uint16_t *halves;
    int64_t room;                     // of them
    const mt_safetensors_file *image; // the file
    const mt_file_checksums *file_sums;
    int descriptor, direct; // the second may be -1
    int status;             // under the slots' lock, as what follows
    bool damaged;           // a sum was another
    mt_error error;
} mt_reader;

static void mt_slots_init(mt_slots *slots) {
    pthread_mutexattr_t lock;
    pthread_condattr_t changed;
    memset(slots, 0, sizeof *slots);
    pthread_mutexattr_init(&lock);
    pthread_condattr_init(&changed);
    pthread_mutexattr_setpshared(&lock, PTHREAD_PROCESS_SHARED);
    pthread_condattr_setpshared(&changed, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&slots->lock, &lock);
    pthread_cond_init(&slots->changed, &changed);
    pthread_mutexattr_destroy(&lock);
    pthread_condattr_destroy(&changed);
}

static void mt_reader_open(mt_reader *r, mt_model *m, const mt_checksums *sums) {
    const int64_t bytes = 2 * MT_DIRECT + (int64_t)MT_SLOTS * MT_STRETCH;
    _Static_assert(sizeof(mt_slots) <= MT_DIRECT && MT_STRETCH % MT_SUM_BLOCK == 0, "places in the shared memory");
    *r = (mt_reader){.model = m, .sums = sums, .descriptor = -1, .direct = -1};
    r->room = MT_STAGED, r->staged = mt_malloc(MT_STAGED * 4), r->halves = mt_malloc(MT_STAGED * 2);
    mt_host_memory_open(&r->shared, &mt_model_grid(m)->world, bytes);
    r->slots = (mt_slots *)mt_align_direct(r->shared.memory); // mapped by pages: the same offset on every rank
    r->window = (char *)r->slots + MT_DIRECT;
    if (r->shared.host.rank == 0) mt_slots_init(r->slots);
    mt_host_memory_barrier(&r->shared);
}

static void mt_reader_close(mt_reader *r) {
    for (int i = 0; i < MT_SPARES; i++) free(r->spare[i]);
    free(r->staged);
    free(r->halves);
    mt_host_memory_barrier(&r->shared);
    if (r->shared.host.rank == 0) {
        pthread_mutex_destroy(&r->slots->lock);
        pthread_cond_destroy(&r->slots->changed);
    }
    mt_host_memory_close(&r->shared);
}

static void mt_reader_fail(mt_reader *r, const mt_error *error, bool damaged) {
    pthread_mutex_lock(&r->slots->lock);
    if (r->status == 0) r->status = -1, r->error = *error;
    r->damaged = r->damaged || damaged;
    pthread_mutex_unlock(&r->slots->lock);
}

/* The next stretch of the file, once its slot is free; -1: there is none. */
static int64_t mt_reader_claim(mt_reader *r) {
    mt_slots *slots = r->slots;
    int64_t count = mt_divide_up(r->image->bytes, MT_STRETCH);
    pthread_mutex_lock(&slots->lock);
    while (slots->claimed < count && slots->uses[slots->claimed % MT_SLOTS] != slots->claimed / MT_SLOTS)
        pthread_cond_wait(&slots->changed, &slots->lock);
    int64_t i = slots->claimed < count ? slots->claimed++ : -1;
    pthread_mutex_unlock(&slots->lock);
    return i;
}

/* Reads bytes [offset, offset + bytes) of the file to an aligned place, whole pages where that can be. */
static int mt_reader_read(const mt_reader *r, char *to, int64_t offset, int64_t bytes) {
    ssize_t got = -1;
    if (r->direct >= 0) got = pread(r->direct, to, (size_t)(mt_divide_up(bytes, MT_DIRECT) * MT_DIRECT), offset);
    int64_t done = mt_max(got, 0);
    return done >= bytes ? 0 : mt_file_read_at(r->descriptor, to + done, bytes - done, offset + done);
}

/* Reads stretch i into its slot, by way of `own` memory where that is not NULL, and checks its blocks. */
static void mt_reader_fill(mt_reader *r, int64_t i, char *own) {
    int64_t offset = i * MT_STRETCH, bytes = mt_min(MT_STRETCH, r->image->bytes - offset);
    char *slot = r->window + i % MT_SLOTS * MT_STRETCH;
    const char *from = own ? own : slot;
    mt_error error;
    if (mt_reader_read(r, own ? own : slot, offset, bytes) != 0) {
        mt_error_set(&error, "%s: cannot be read: %s; check the disk", r->image->path, strerror(errno));
        mt_reader_fail(r, &error, false);
        return;
    }
    for (int64_t first = 0; first < bytes; first += MT_SUM_BLOCK) {
        int64_t block = (offset + first) / MT_SUM_BLOCK, n = mt_min(MT_SUM_BLOCK, bytes - first);
        if (own) memcpy(slot + first, own + first, (size_t)n);
        if (!r->file_sums) continue;
        if (block < r->file_sums->count && mt_crc32c(from + first, n) == r->file_sums->sums[block]) continue;
        char *folder = mt_strdup(r->image->path), *slash = strrchr(folder, '/');
        if (slash) *slash = 0;
        mt_checksums_damaged(&error, folder, r->file_sums->name, block, r->image->bytes);
        mt_reader_fail(r, &error, true);
        free(folder);
        return;
    }
}

/* A thread: reads stretches until there are no more. What cannot be read passes by too, so that no rank waits for it.
 * Memory that processes share has small pages, one by one for the disk, which then is slower than by one more copy. */
static void *mt_reader_run(void *context) {
    mt_reader *r = context;
    char *own = r->shared.host.size > 1 ? mt_cpu_ops.memory_alloc(MT_STRETCH) : NULL;
    for (int64_t i; (i = mt_reader_claim(r)) >= 0;) {
        if (r->descriptor >= 0) mt_reader_fill(r, i, own);
        pthread_mutex_lock(&r->slots->lock);
        r->slots->ready[i % MT_SLOTS] = i + 1;
        pthread_cond_broadcast(&r->slots->changed);
        pthread_mutex_unlock(&r->slots->lock);
    }
    if (own) mt_cpu_ops.memory_free(own);
    return NULL;
}

/* Waits for stretch i, which any rank may read: one that never does is named as in a collective. */
static const char *mt_reader_get(mt_reader *r, int64_t i) {
    mt_watch_begin("reading a checkpoint", r->shared.host.name);
    pthread_mutex_lock(&r->slots->lock);
    while (r->slots->ready[i % MT_SLOTS] != i + 1) pthread_cond_wait(&r->slots->changed, &r->slots->lock);
    pthread_mutex_unlock(&r->slots->lock);
    mt_watch_end();
    return r->window + i % MT_SLOTS * MT_STRETCH;
}

/* This rank is done with it. */
static void mt_reader_give_back(mt_reader *r, int64_t i) {
    mt_slots *slots = r->slots;
    int64_t slot = i % MT_SLOTS;
    pthread_mutex_lock(&slots->lock);
    if (++slots->taken[slot] == r->shared.host.size) {
        slots->taken[slot] = 0, slots->uses[slot]++;
        pthread_cond_broadcast(&slots->changed);
    }
    pthread_mutex_unlock(&slots->lock);
}

/* Puts n elements at a place of the whole parameter that lies here into its bucket. */
static void mt_wanted_put(mt_reader *r, mt_wanted *w, int64_t at, const float *values, int64_t n) {
    mt_model *m = r->model;
    bool halves = w->weights.data && w->weights.dtype == MT_BF16;
    at += w->param->offset;
    for (int64_t done = 0, count; done < n; done += count) {
        count = mt_min(n - done, r->room);
        if (w->weights.data) w->not_finite += mt_count_not_finite(&w->weights, at + done, values + done, count);
        for (int64_t i = 0; halves && i < count; i++) r->halves[i] = mt_f32_to_bf16(values[done + i]);
        if (w->floats.data) mt_part_write(m, &w->floats, at + done, values + done, count);
        if (w->weights.data)
            mt_part_write(m, &w->weights, at + done, halves ? (const void *)r->halves : values + done, count);
        mt_model_ops(m)->stream_wait(mt_model_stream(m)); // before the buffers are filled again
    }
}

/* Rows [row, row + rows) and columns [col, col + cols) of a matrix. */
typedef struct mt_window {
    int64_t row, rows, col, cols;
} mt_window;

static mt_window mt_window_meet(mt_window a, mt_window b) {
    int64_t row = mt_max(a.row, b.row), col = mt_max(a.col, b.col);
    int64_t rows = mt_min(a.row + a.rows, b.row + b.rows) - row, cols = mt_min(a.col + a.cols, b.col + b.cols) - col;
    return (mt_window){row, mt_max(rows, 0), col, mt_max(cols, 0)};
}

/* Rows [*first, *end) of what lies here of a parameter, of which the parts that are wanted have something: not all,
 * where a data group shares them out. */
static void mt_wanted_rows(const mt_wanted *w, int64_t *first, int64_t *end) {
    const mt_part *parts[] = {&w->weights, &w->floats};
    int64_t cols = w->param->cols, count = mt_param_rows_stored(w->param) * cols;
    *first = count, *end = 0;
    for (int i = 0; i < 2; i++) {
        int64_t begin = mt_max(parts[i]->first - w->param->offset, 0);
        int64_t last = mt_min(parts[i]->first + parts[i]->count - w->param->offset, count);
        if (!parts[i]->data || begin >= last) continue;
        *first = mt_min(*first, begin / cols), *end = mt_max(*end, mt_divide_up(last, cols));
    }
    if (*end == 0) *first = 0;
}

/* What is wanted of a parameter, as rows and columns of its tensor. */
static mt_window mt_wanted_window(const mt_wanted *w) {
    const mt_param *param = w->param;
    mt_window own = {param->hf_row + param->first_row, mt_param_rows_stored(param), param->first_col, param->cols};
    if (!param->hf_transposed) return own;
    int64_t first, end;
    mt_wanted_rows(w, &first, &end);
    return (mt_window){own.col, own.cols, own.row + first, end - first};
}

/* Memory for a tensor to turn in, which comes back: pages that are new would cost more than what is done in them. */
static float *mt_reader_borrow(mt_reader *r, int64_t bytes) {
    for (int i = 0; i < MT_SPARES; i++)
        if (r->spare[i] && r->spare_bytes[i] == bytes) {
            float *memory = r->spare[i];
            r->spare[i] = NULL;
            return memory;
        }
    return mt_malloc(bytes);
}

static void mt_reader_lay_by(mt_reader *r, float *memory, int64_t bytes) {
    int at = r->next_spare++ % MT_SPARES; // the oldest goes
    for (int i = 0; i < MT_SPARES; i++)
        if (!r->spare[i]) at = i;
    free(r->spare[at]);
    r->spare[at] = memory, r->spare_bytes[at] = bytes;
}

/* The same for n stored numbers, which become floats first unless they are. */
static void mt_wanted_put_stored(mt_reader *r, mt_wanted *w, int64_t at, const char *from, int64_t n) {
    mt_dtype dtype = w->tensor->dtype;
    if (dtype == MT_F32 && (uintptr_t)from % sizeof(float) == 0) {
        mt_wanted_put(r, w, at, (const float *)(const void *)from, n);
        return;
    }
    for (int64_t done = 0, count; done < n; done += count) {
        count = mt_min(n - done, r->room);
        mt_stored_to_f32(r->staged, 1, from + done * mt_dtype_size(dtype), dtype, count);
        mt_wanted_put(r, w, at + done, r->staged, count);
    }
}

/* to[n, m] with rows of `pitch` numbers = from[m, n] with rows of `width` stored ones, turned; 16 lines of `to` at a
 * time stay in the cache. */
static void mt_stored_turn(float *to, int64_t pitch, const char *from, int64_t width, mt_dtype dtype, int64_t m,
                           int64_t n) {
    int64_t size = mt_dtype_size(dtype);
    for (int64_t first = 0, lines; first < n; first += lines) {
        lines = mt_min(n - first, 16);
        for (int64_t row = 0; row < m; row++)
            mt_stored_to_f32(to + first * pitch + row, pitch, from + (row * width + first) * size, dtype, lines);
    }
}

/* Takes what is wanted of a window of the tensor, whose elements lie at `data` row after row. */
static void mt_wanted_take(mt_reader *r, mt_wanted *w, mt_window given, const char *data) {
    const mt_param *param = w->param;
    mt_dtype dtype = w->tensor->dtype;
    mt_window own = mt_wanted_window(w), part = mt_window_meet(given, own);
    int64_t size = mt_dtype_size(dtype), cols = param->cols;
    if (part.rows == 0 || part.cols == 0) return;
    if (param->hf_transposed) {
        if (!w->turned) w->turned = mt_reader_borrow(r, own.rows * own.cols * 4);
        mt_stored_turn(w->turned + (part.col - own.col) * cols + part.row - own.row, cols,
                       data + ((part.row - given.row) * given.cols + part.col - given.col) * size, given.cols, dtype,
                       part.rows, part.cols);
        return;
    }
    bool together = part.cols == given.cols && part.cols == cols; // whole rows on both sides
    for (int64_t row = 0, rows = together ? part.rows : 1; row < part.rows; row += rows) {
        const char *from = data + ((part.row + row - given.row) * given.cols + part.col - given.col) * size;
        int64_t to_row = part.row + row - own.row, to_col = part.col - own.col;
        mt_wanted_put_stored(r, w, to_row * cols + to_col, from, rows * part.cols);
    }
}

/* Takes what is wanted of elements [begin, end) of a tensor: a row in part, whole rows, a row in part. */
static void mt_wanted_take_elements(mt_reader *r, mt_wanted *w, int64_t begin, int64_t end, const char *data) {
    const mt_param *param = w->param;
    int64_t width = param->hf_transposed ? param->hf_rows_total : param->whole_cols;
    int64_t size = mt_dtype_size(w->tensor->dtype);
    while (begin < end) {
        mt_window given = {begin / width, (end - begin) / width, 0, width};
        if (begin % width > 0 || given.rows == 0)
            given = (mt_window){begin / width, 1, begin % width, mt_min(width - begin % width, end - begin)};
        mt_wanted_take(r, w, given, data);
        begin += given.rows * given.cols, data += given.rows * given.cols * size;
    }
}

/* The tensor has passed by: what had to be turned goes into the bucket, and padding rows become 0. */
static void mt_wanted_finish(mt_reader *r, mt_wanted *w) {
    const mt_param *param = w->param;
    int64_t stored = mt_param_rows_stored(param) * param->cols, padding = param->rows * param->cols - stored;
    if (w->turned) {
        mt_window own = mt_wanted_window(w);
        mt_wanted_put(r, w, (own.col - param->hf_row - param->first_row) * param->cols, w->turned, own.rows * own.cols);
        mt_reader_lay_by(r, w->turned, own.rows * own.cols * 4);
        w->turned = NULL;
    }
    if (w->floats.data) mt_part_write(r->model, &w->floats, param->offset + stored, NULL, padding);
    if (w->weights.data) mt_part_write(r->model, &w->weights, param->offset + stored, NULL, padding);
}

/* Takes what is wanted of bytes [begin, end) of the file, which lie at `data`. An element that is cut by an end comes
 * from the mapped file, with the bytes behind it. */
static void mt_reader_take(mt_reader *r, mt_wanted *w, int64_t begin, int64_t end, const char *data) {
    const mt_tensor_info *tensor = w->tensor;
    int64_t start = (const unsigned char *)tensor->data - r->image->base, size = mt_dtype_size(tensor->dtype);
    int64_t count = tensor->bytes / size;
    if (start >= end || start + tensor->bytes <= begin) return;
    int64_t first = begin <= start ? 0 : (begin - start + size - 1) / size, last = mt_min((end - start) / size, count);
    if (begin > start && (begin - start) % size != 0)
        mt_wanted_take_elements(r, w, first - 1, first, (const char *)tensor->data + (first - 1) * size);
    if (first < last) mt_wanted_take_elements(r, w, first, last, data + start + first * size - begin);
    if (start + tensor->bytes <= end) mt_wanted_finish(r, w);
}

/* Begins a file: its slots are empty, its threads read. Returns how many. */
static int mt_reader_begin(mt_reader *r, const mt_safetensors_file *image, pthread_t threads[MT_READERS]) {
    const char *slash = strrchr(image->path, '/');
    int count = (int)mt_max(MT_READERS / r->shared.host.size, 1);
    mt_error error;
    r->image = image;
    r->file_sums = r->sums ? mt_checksums_find(r->sums, slash ? slash + 1 : image->path) : NULL;
    r->descriptor = open(image->path, O_RDONLY | O_CLOEXEC);
    r->direct = mt_open_direct(image->path, O_RDONLY);
    if (r->descriptor < 0) {
        mt_error_set(&error, "%s: cannot be read: %s; check the disk", image->path, strerror(errno));
        mt_reader_fail(r, &error, false);
    }
    mt_host_memory_barrier(&r->shared); // all are done with the file before
    if (r->shared.host.rank == 0) {
        mt_slots *slots = r->slots;
        slots->claimed = 0;
        memset(slots->ready, 0, sizeof slots->ready);
        memset(slots->taken, 0, sizeof slots->taken);
        memset(slots->uses, 0, sizeof slots->uses);
    }
    mt_host_memory_barrier(&r->shared);
    for (int i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, mt_reader_run, r) != 0) mt_die("cannot start a thread; raise ulimit -u");
    return count;
}

/* Reads one file and takes wanted[count], which are its tensors in their order. Every rank of the host calls it. */
static void mt_reader_pass(mt_reader *r, const mt_safetensors_file *image, mt_wanted *wanted, int64_t count) {
    pthread_t threads[MT_READERS];
    int num_threads = mt_reader_begin(r, image, threads);
    int64_t first = 0;
    for (int64_t begin = 0; begin < image->bytes; begin += MT_STRETCH) {
        int64_t end = mt_min(begin + MT_STRETCH, image->bytes);
        const char *data = mt_reader_get(r, begin / MT_STRETCH);
        for (int64_t i = first; i < count; i++) {
            int64_t start = (const unsigned char *)wanted[i].tensor->data - image->base;
            if (start >= end) break;
            mt_reader_take(r, &wanted[i], begin, end, data);
            if (i == first && start + wanted[i].tensor->bytes <= end) first++;
        }
        mt_reader_give_back(r, begin / MT_STRETCH);
    }
    for (int i = 0; i < num_threads; i++) pthread_join(threads[i], NULL);
    if (r->descriptor >= 0) close(r->descriptor);
    if (r->direct >= 0) close(r->direct);
}

static int mt_wanted_by_place(const void *a, const void *b) {
    const mt_wanted *x = a, *y = b;
    int order = strcmp(x->tensor->file, y->tensor->file);
    if (order != 0) return order;
    return (x->tensor->data > y->tensor->data) - (x->tensor->data < y->tensor->data);
}

/* Reads all files of a set and takes wanted[count] from them. Every rank calls it and returns the same; *damaged: for
 * what a sum says. */
static int mt_safetensors_take(mt_safetensors *file, mt_model *m, const mt_checksums *sums, mt_wanted *wanted,
                               int64_t count, bool *damaged, mt_error *error) {
    mt_reader r;
    mt_reader_open(&r, m, sums);
    if (count > 0) qsort(wanted, (size_t)count, sizeof *wanted, mt_wanted_by_place);
    for (int64_t i = 0; i < mt_safetensors_num_files(file); i++) {
        int64_t first = 0, end;
        while (first < count && wanted[first].tensor->file != mt_safetensors_get_file(file, i)->path) first++;
        for (end = first; end < count && wanted[end].tensor->file == mt_safetensors_get_file(file, i)->path;) end++;
        mt_reader_pass(&r, mt_safetensors_get_file(file, i), wanted + first, end - first);
    }
    double bad = r.damaged;
    mt_all_reduce_max(&mt_model_grid(m)->world, &bad, 1, MT_F64);
    if (bad > 0) *damaged = true;
    if (r.status != 0) *error = r.error;
    int status = mt_agree(&mt_model_grid(m)->world, r.status != 0, error);
    mt_reader_close(&r);
    return status;
}

/* Weights, and for bf16 the master weights, which keep what was stored. Everything is checked, by every rank, before
 * anything is set. */
static int mt_weights_load(mt_model *m, const char *folder, const mt_checksums *sums, bool *damaged, mt_error *error) {
    mt_safetensors *file = NULL;
    int status = mt_safetensors_open_folder(&file, folder, "model", error);
    if (status == 0) status = mt_weights_check(mt_model_options(m), folder, file, error);
    status = mt_agree(&mt_model_grid(m)->world, status != 0, error);
    if (status != 0) {
        mt_safetensors_close(file);
        return status;
    }
    int64_t num_params;
    const mt_param *params = mt_model_params(m, &num_params);
    mt_wanted *wanted = mt_calloc(mt_max(num_params, 1) * (int64_t)sizeof *wanted);
    for (int64_t i = 0; i < num_params; i++) {
        const mt_param *param = &params[i];
        wanted[i] = (mt_wanted){.param = param, .tensor = mt_safetensors_find_param(file, param->hf_name)};
        wanted[i].weights = mt_bucket_part(m, param->bucket, MT_STATE_WEIGHTS);
        if (mt_model_dtype(m) != MT_F32 && param->trained)
            wanted[i].floats = mt_bucket_part(m, param->bucket, MT_STATE_MASTER);
    }
    status = mt_safetensors_take(file, m, sums, wanted, num_params, damaged, error);
    for (int64_t i = 0; i < num_params && status == 0; i++) {
        const mt_param *param = wanted[i].param;
        const mt_bucket *b = mt_bucket_get(m, param->bucket);
        bool tells = param->counted && (b->group->rank == 0 || b->strategy == MT_SHARD_PARAMS);
        if (wanted[i].not_finite > 0 && tells)
            fprintf(stderr, "warning: %s: %lld values of tensor \"%s\" are not finite\n", wanted[i].tensor->file,
                    (long long)wanted[i].not_finite, wanted[i].tensor->name);
    }
    free(wanted);
    mt_safetensors_close(file);
    return status;
}

/* ---- which checkpoint: folders iter_NNNNNNN, of which latest_checkpointed_iteration.txt names the last */

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

int mt_checkpoint_verify(const char *folder, bool whole, mt_error *error) {
    mt_checksums sums;
    if (mt_checksums_read(&sums, folder, error) != 0) return -1;
    int status = sums.count > 0 ? mt_checksums_verify(&sums, folder, whole, error) : 0;
    bool has_sums = sums.count > 0;
    mt_checksums_free(&sums);
    if (status != 0 || has_sums || !mt_folder_has(folder, "trainer.json")) return status;
    char *path = mt_path_join(folder, "trainer.json");
    json_t *json = mt_json_read(path, error);
    if (!json || json_integer_value(json_object_get(json, "version")) >= MT_TRAINER_VERSION)
        status = mt_error_set(error, "%s: damaged: %s; take another checkpoint", json ? folder : path,
                              json ? "its checksums.json is not there" : "it is no JSON");
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

char *mt_checkpoint_resolve(const char *folder, mt_error *error) {
    struct stat status;
    char name[64];
    bool found = stat(folder, &status) == 0;
    if (!found || !S_ISDIR(status.st_mode)) {
        mt_error_set(error, "%s: %s; name a folder that holds config.json, or one that --save wrote", folder,
                     found ? "is a file, not a folder" : strerror(errno));
        return NULL;
    }
    if (!mt_folder_has(folder, "latest_checkpointed_iteration.txt")) {
        if (mt_folder_has(folder, "config.json")) return mt_strdup(folder);
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
    snprintf(name, sizeof name, "iter_%07lld", (long long)iteration);
    path = mt_path_join(folder, name);
    if (mt_folder_has(path, "config.json")) return path;
    mt_error_set(error,
                 "%s: has no config.json, but latest_checkpointed_iteration.txt beside it names iteration %lld; "
                 "write the number of a whole iter_NNNNNNN in it",
                 path, (long long)iteration);
    free(path);
    return NULL;
}

/* The last checkpoint of a folder before iteration `before` whose small files are whole and whose others have their
 * sizes; of those that latest_checkpointed_iteration.txt does not name too early. -1: there is none, with the error of
 * the last one that is not whole, or of their absence. */
static int64_t mt_checkpoint_whole_before(const char *folder, int64_t before, mt_error *error) {
    mt_iterations found = mt_iterations_list(folder);
    int64_t number = -1;
    mt_error_set(error, "%s: holds no checkpoint; begin anew, or name another folder", folder);
    for (int64_t i = 0; i < found.count && number < 0; i++) {
        if (found.numbers[i] >= before) continue;
        char *path = mt_iteration_path(folder, found.numbers[i]);
        if (mt_folder_has(path, "config.json") && mt_checkpoint_verify(path, false, error) == 0)
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
           mt_folder_has(folder, "config.json");
}

char *mt_checkpoint_resolve_whole(const char *folder, mt_error *error) {
    mt_error damage;
    char *path = mt_checkpoint_resolve(folder, &damage);
    if (path && mt_checkpoint_verify(path, false, &damage) == 0) return path;
    int64_t number = path && strrchr(path, '/') ? mt_iteration_of(strrchr(path, '/') + 1) : INT64_MAX;
    free(path);
    number = mt_checkpoint_whole_before(folder, number < 0 ? INT64_MAX : number, error);
    if (number < 0) *error = damage;
    return number < 0 ? NULL : mt_iteration_path(folder, number);
}

/* ---- resuming: where a run left off, so that it continues bit for bit */

/* The tensor that keeps one kind of value of a parameter. */
static const mt_tensor_info *mt_optimizer_find(const mt_safetensors *file, const mt_param *param,
                                               mt_param_state state) {
    char name[192];
    snprintf(name, sizeof name, "%s%s", mt_state_prefix[state], param->hf_name);
    return mt_safetensors_find(file, name);
}

/* Whether a folder holds every kind of state from `first` on of every parameter of the model. */
static int mt_optimizer_check(const mt_param *rows, int64_t count, mt_param_state first, const char *folder,
                              const mt_safetensors *file, mt_error *error) {
    int status = 0;
    for (int64_t i = 0; i < count; i++)
        for (int state = first; state < MT_NUM_STATES && status == 0 && rows[i].trained; state++) {
            const mt_tensor_info *tensor = mt_optimizer_find(file, &rows[i], (mt_param_state)state);
            status = tensor ? mt_param_check(&rows[i], tensor, error)
                            : mt_error_set(error,
                                           "%s: the optimizer's state has no tensor \"%s%s\"; go on without it by "
                                           "--no-load-optim, or get the folder again",
                                           folder, mt_state_prefix[state], rows[i].hf_name);
        }
    return status;
}

/* Moments and, where they were kept, master weights. A bf16 run may go on in fp32, from its master weights, and an fp32
 * run in bf16, with its weights for master weights. */
static int mt_optimizer_load(mt_model *m, const char *folder, const mt_checksums *sums, bool *damaged,
                             mt_error *error) {
    mt_safetensors *file = NULL;
    mt_param *rows;
    mt_param_state first = MT_STATE_EXP_AVG;
    int64_t count = mt_params_build(&rows, mt_model_options(m), NULL), num_wanted = 0;
    int status = mt_safetensors_open_folder(&file, folder, "optimizer", error);
    if (status == 0 && mt_optimizer_find(file, &rows[0], MT_STATE_MASTER)) first = MT_STATE_MASTER;
    if (status == 0) status = mt_optimizer_check(rows, count, first, folder, file, error);
    free(rows);
    status = mt_agree(&mt_model_grid(m)->world, status != 0, error);
    int64_t num_params;
    const mt_param *params = mt_model_params(m, &num_params);
    mt_wanted *wanted = mt_calloc(mt_max(num_params * MT_NUM_STATES, 1) * (int64_t)sizeof *wanted);
    for (int64_t i = 0; i < num_params && status == 0; i++)
        for (int state = first; state < MT_NUM_STATES && params[i].trained;
             state++) { // an fp32 model's weights are its master weights
            mt_wanted *w = &wanted[num_wanted++];
            *w = (mt_wanted){.param = &params[i], .tensor = mt_optimizer_find(file, &params[i], (mt_param_state)state)};
            w->floats = mt_bucket_part(m, params[i].bucket, (mt_param_state)state);
        }
    if (status == 0) status = mt_safetensors_take(file, m, sums, wanted, num_wanted, damaged, error);
    free(wanted);
    mt_safetensors_close(file);
    return status;
}

/* A whole number >= 0 of trainer.json. */
static int mt_trainer_int(const json_t *json, const char *key, const char *path, int64_t *value, mt_error *error) {
    const json_t *item = json_object_get(json, key);
    *value = json_integer_value(item);
    if (json_is_integer(item) && *value >= 0) return 0;
    return mt_error_set(error, "%s: has no whole number \"%s\"; begin anew from these weights by --finetune", path,
                        key);
}

/* Samples are counted and drawn in terms of these, so a run goes on with what it was begun with. */
static int mt_trainer_agrees(const char *path, const char *option, int64_t then, int64_t now, mt_error *error) {
    if (then == now) return 0;
    return mt_error_set(error, "%s: the run was begun with %s %lld, not %lld; give that, or begin anew by --finetune",
                        path, option, (long long)then, (long long)now);
}

static int mt_trainer_read(const mt_model *m, mt_run_state *state, const char *path, mt_error *error) {
    int64_t version, seed, seq_length;
    const struct {
        const char *key;
        int64_t *value;
    } fields[] = {{"version", &version},
                  {"iteration", &state->iteration},
                  {"consumed_train_samples", &state->consumed_train_samples},
                  {"consumed_valid_samples", &state->consumed_valid_samples},
                  {"optimizer_step", &state->optimizer_step},
                  {"seed", &seed},
                  {"seq_length", &seq_length}};
    json_t *json = mt_json_read(path, error);
    int status = json ? 0 : -1;
    for (size_t i = 0; i < sizeof fields / sizeof *fields && status == 0; i++)
        status = mt_trainer_int(json, fields[i].key, path, fields[i].value, error);
    json_decref(json);
    if (status != 0) return -1;
    if (version > MT_TRAINER_VERSION)
        return mt_error_set(error, "%s: version %lld was written by a later version of this program; update it", path,
                            (long long)version);
    if (!mt_model_options(m)->no_load_rng &&
        mt_trainer_agrees(path, "--seed", seed, mt_model_options(m)->seed, error) != 0)
        return -1;
    return mt_trainer_agrees(path, "--seq-length", seq_length, mt_model_options(m)->seq_length, error);
}

/* The optimizer and the place in the run; `folder` is one iteration's. */
static int mt_run_load(mt_model *m, mt_run_state *state, const char *folder, const mt_checksums *sums, bool *damaged,
                       mt_error *error) {
    bool has_optimizer =
        mt_folder_has(folder, "optimizer.safetensors") || mt_folder_has(folder, "optimizer.safetensors.index.json");
    bool continues = mt_folder_has(folder, "trainer.json") && (has_optimizer || mt_model_options(m)->no_load_optim);
    mt_broadcast(&mt_model_grid(m)->world, &continues, sizeof continues, 0); // all do what rank 0's folder says
    if (!mt_model_get_plan(m)->train || mt_model_options(m)->finetune || !continues) return 0;
    char *path = mt_path_join(folder, "trainer.json");
    int status = mt_agree(&mt_model_grid(m)->world, mt_trainer_read(m, state, path, error) != 0, error);
    free(path);
    if (status == 0 && mt_model_options(m)->no_load_optim) state->optimizer_step = 0; // the moments begin at 0 too
    return status == 0 && !mt_model_options(m)->no_load_optim ? mt_optimizer_load(m, folder, sums, damaged, error)
                                                              : status;
}

/* Loads one folder. *damaged: it is not what was saved, by its sums. Where reading it fails in any other way, such as a
 * tensor of another name, rank 0 looks through all of it for damage first. */
static int mt_folder_load(mt_model *m, mt_run_state *state, const char *folder, bool *damaged, mt_error *error) {
    const mt_group *world = &mt_model_grid(m)->world;
    mt_checksums sums = {0};
    *damaged = world->rank == 0 && mt_checkpoint_verify(folder, false, error) != 0;
    int status = mt_agree(world, *damaged, error);
    if (status == 0) status = mt_agree(world, mt_checksums_read(&sums, folder, error) != 0, error);
    if (status == 0) status = mt_weights_load(m, folder, sums.count > 0 ? &sums : NULL, damaged, error);
    if (status == 0) status = mt_run_load(m, state, folder, sums.count > 0 ? &sums : NULL, damaged, error);
    if (status != 0 && sums.count > 0) {
        mt_error found;
        if (world->rank == 0 && !*damaged && mt_checkpoint_verify(folder, true, &found) != 0)
            *damaged = true, *error = found;
        mt_broadcast(world, error, sizeof *error, 0);
    }
    mt_broadcast(world, damaged, sizeof *damaged, 0);
    mt_checksums_free(&sums);
    return status;
}

/* Clears the moments that a damaged checkpoint has left behind. */
static void mt_optimizer_zero(mt_model *m) {
    int64_t num_params;
    const mt_param *params = mt_model_params(m, &num_params);
    for (int64_t i = 0; i < num_params && mt_model_get_plan(m)->train; i++)
        for (int state = MT_STATE_EXP_AVG; state < MT_NUM_STATES && params[i].trained; state++) {
            mt_part part = mt_bucket_part(m, params[i].bucket, (mt_param_state)state);
            mt_part_write(m, &part, params[i].offset, NULL, params[i].rows * params[i].cols);
        }
}

/* Tells what is wrong with a checkpoint and returns the one before it, the same on every rank, or -1. */
static int64_t mt_checkpoint_fall_back(const mt_group *world, const char *folder, int64_t from,
                                       const mt_error *damage) {
    int64_t number = -1;
    mt_error ignored;
    if (world->rank == 0) {
        number = mt_checkpoint_whole_before(folder, from, &ignored);
        if (number >= 0)
            fprintf(stderr, "warning: %s; going on from iteration %lld\n", damage->text, (long long)number);
    }
    mt_broadcast(world, &number, sizeof number, 0);
    return number;
}

bool mt_options_falls_back(const mt_options *options) {
    return options->load && options->save && strcmp(options->load, options->save) == 0;
}

/* What mt_checkpoint_resolve says on rank 0, for all ranks: while they ask one after another, a save may put another
 * checkpoint in the place of the latest. *number: the iteration, or -1 for a folder that is no checkpoint's. */
static int mt_checkpoint_choose(const mt_group *world, const char *folder, char **path, int64_t *number,
                                mt_error *error) {
    char *found = world->rank == 0 ? mt_checkpoint_resolve(folder, error) : NULL;
    bool is_latest = found && strcmp(found, folder) != 0; // rather than the folder itself
    *number = found && strrchr(found, '/') ? mt_iteration_of(strrchr(found, '/') + 1) : -1;
    *path = NULL;
    free(found);
    if (mt_agree(world, world->rank == 0 && !found, error) != 0) return -1;
    mt_broadcast(world, &is_latest, sizeof is_latest, 0);
    mt_broadcast(world, number, sizeof *number, 0);
    *path = is_latest ? mt_iteration_path(folder, *number) : mt_strdup(folder);
    bool sees = mt_folder_has(*path, "config.json");
    if (!sees)
        mt_error_set(error, "%s: rank 0 sees it, rank %d does not; on several hosts it must be a folder of all", *path,
                     world->rank);
    return mt_agree(world, !sees, error);
}

int mt_checkpoint_load(mt_model *m, mt_run_state *state, const char *folder, mt_error *error) {
    const mt_group *world = &mt_model_grid(m)->world;
    const char *loads = mt_model_options(m)->load;
    bool falls_back = mt_options_falls_back(mt_model_options(m)) && loads && strcmp(folder, loads) == 0,
         damaged = false;
    char *path;
    int64_t number;
    int status = mt_checkpoint_choose(world, folder, &path, &number, error);
    *state = (mt_run_state){0};
    if (status != 0 && falls_back) number = INT64_MAX, damaged = true;
    if (status == 0) status = mt_folder_load(m, state, path, &damaged, error);
    while (status != 0 && damaged && falls_back && number >= 0) {
        number = mt_checkpoint_fall_back(world, folder, number, error);
        if (number < 0) break;
        free(path);
        path = mt_iteration_path(folder, number);
        *state = (mt_run_state){0};
        mt_optimizer_zero(m);
        status = mt_folder_load(m, state, path, &damaged, error);
    }
    free(path);
    return status;
}

/* ---- a folder in one call */

/* The options of a folder: its shape, then the caller's settings. */
static int mt_hf_read_options(mt_hf *hf, const char *folder, const char *const *settings, mt_error *error) {
    mt_options *o = &hf->options;
    const mt_group *world = &hf->grid->world;
    mt_options_default(o);
    for (; settings && settings[0]; settings += 2)
        if (mt_options_set(o, settings[0], settings[1], error) != 0) return -1;
    if (mt_options_set(o, "load", folder, error) != 0 || mt_options_read_shape(o, error) != 0) return -1;
    if (mt_options_finish(o, MT_PROGRAM_INFER, world->size, error) != 0) return -1;
    char *resolved = mt_checkpoint_resolve(folder, error);
    int status = resolved ? mt_stops_read(&hf->stops, resolved, o, error) : -1;
    free(resolved);
    return status;
}

static int mt_hf_create(mt_hf *hf, int64_t count, int64_t max_tokens, mt_error *error) {
    enum { CONTEXT = 4096 };
    const mt_options *o = &hf->options;
    int64_t context = o->max_position_embeddings;
    if (max_tokens > context)
        return mt_error_set(error, "%s: the model's context is %lld tokens; ask for at most so many, not %lld", o->load,
                            (long long)context, (long long)max_tokens);
    if (max_tokens == 0) max_tokens = mt_min(context, CONTEXT);
    mt_model_plan plan = mt_generator_plan(count, max_tokens, count * max_tokens);
    mt_run_state ignored;
    const mt_ops *ops = mt_backend_open(o->device, hf->grid, error);
    if (!ops || mt_model_create(&hf->model, o, hf->grid, ops, &plan, error) != 0) return -1;
    return mt_checkpoint_load(hf->model, &ignored, o->load, error);
}

int mt_hf_open(mt_hf **out, const char *folder, const char *const *settings, int64_t count, int64_t max_tokens,
               mt_grid *grid, mt_error *error) {
    mt_hf *hf = mt_calloc(sizeof *hf);
    hf->grid = grid;
    int status = mt_agree(&grid->world, mt_hf_read_options(hf, folder, settings, error) != 0, error);
    if (status == 0) status = mt_options_agree(&hf->options, &grid->world, error);
    if (status == 0) status = mt_grid_build(grid, &hf->options, error);
    if (status == 0) status = mt_hf_create(hf, count, max_tokens, error);
    if (status != 0) mt_hf_close(hf);
    *out = status == 0 ? hf : NULL;
    return status;
}

void mt_hf_close(mt_hf *hf) {
    if (!hf) return;
    mt_model_destroy(hf->model);
    mt_grid_clear(hf->grid);
    mt_options_free(&hf->options);
    free(hf);
}

/* ---- going back */

int mt_checkpoint_rewind(mt_model *m, mt_run_state *state, mt_saver *saver, mt_error *error) {
    const mt_options *o = mt_model_options(m);
    const mt_group *world = &mt_model_grid(m)->world;
    if (mt_saver_finish(saver, error) != 0) return -1; // it must not replace or remove the one that is loaded
    bool saved = o->save && mt_folder_has(o->save, "latest_checkpointed_iteration.txt");
    mt_broadcast(world, &saved, sizeof saved, 0);
    if (!saved && !o->load)
        return mt_error_set(error,
                            "--bad-step-policy rewind: iteration %lld is bad, and there is no checkpoint yet to "
                            "go back to; lower --save-interval",
                            (long long)mt_train_bad_iteration(m));
    if (mt_checkpoint_load(m, state, saved ? o->save : o->load, error) != 0) return -1;
    mt_train_rewound(m);
    if (world->rank == 0) fprintf(stderr, "warning: went back to iteration %lld\n", (long long)state->iteration);
    return 0;
}
