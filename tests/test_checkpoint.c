/* Checkpoints: load and save weights of every family, save without harm to older checkpoints, resume bit for bit. */
// Sections of megatron.c: §12b §14 §12a
#include "folder.h"
#include "golden.h"
#include "../data/base/safetensors.h"
#include "../data/checkpoint/checkpoint_folder.h"
#include "../data/checkpoint/checkpoint_fp8.h"
#include "../data/checkpoint/checkpoint_save.h"
#include "../data/models/hf_config.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void write_text(const char *path, const char *text) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
    assert_int_equal(fclose(file), 0);
}

static bool exists(const char *path) {
    struct stat status;
    return lstat(path, &status) == 0;
}

static int64_t count_entries(const char *folder, const char *part) {
    int64_t count = 0;
    DIR *directory = opendir(folder);
    assert_non_null(directory);
    for (struct dirent *entry; (entry = readdir(directory));) count += strstr(entry->d_name, part) != NULL;
    closedir(directory);
    return count;
}

static void assert_says(const mt_error *error, const char *words) {
    assert_null(strchr(error->text, '\n'));
    assert_non_null(strchr(error->text, ';')); // the fault; the remedy
    if (!strstr(error->text, words)) fail_msg("\"%s\" does not say \"%s\"", error->text, words);
}

/* ---- models */

static void load(fixture *f, mt_run_state *state, const char *folder) {
    mt_error error;
    if (mt_checkpoint_load(f->model, &f->options, state, folder, &error) != 0) fail_msg("%s", error.text);
}

static void save(fixture *f, const mt_run_state *state, const char *folder) {
    mt_error error;
    if (mt_checkpoint_save(f->model, &f->options, state, folder, NULL, NULL, &error) != 0) fail_msg("%s", error.text);
}

static void assert_load_fails(fixture *f, const char *folder, const char *words) {
    mt_error error;
    mt_run_state state;
    if (mt_checkpoint_load(f->model, &f->options, &state, folder, &error) == 0)
        fail_msg("loaded, but not for \"%s\"", words);
    assert_says(&error, words);
}

static void assert_save_fails(fixture *f, const char *folder, const char *words) {
    mt_error error;
    mt_run_state state = {.iteration = 7};
    if (mt_checkpoint_save(f->model, &f->options, &state, folder, NULL, NULL, &error) == 0)
        fail_msg("saved, but not for %s", words);
    assert_says(&error, words);
}

/* Fills every bucket, so that a value that is not loaded differs. */
static void spoil(fixture *f) {
    int64_t count;
    mt_bucket *buckets = mt_model_buckets(f->model, &count);
    for (int64_t i = 0; i < count; i++) {
        memset(buckets[i].params, 0x3c, (size_t)(buckets[i].count * mt_dtype_size(buckets[i].dtype)));
        float *states[] = {buckets[i].master, buckets[i].m, buckets[i].v};
        for (int k = 0; k < 3; k++)
            if (states[k]) memset(states[k], 0x3c, (size_t)(buckets[i].count * 4));
    }
}

/* Gives master weights and moments distinct values. */
static void fill_state(fixture *f) {
    int64_t num_params, num_buckets;
    const mt_param *params = mt_model_params(f->model, &num_params);
    mt_bucket *buckets = mt_model_buckets(f->model, &num_buckets);
    for (int64_t i = 0; i < num_params; i++) {
        float *states[] = {buckets[params[i].bucket].master, buckets[params[i].bucket].m, buckets[params[i].bucket].v};
        for (int k = 0; k < 3; k++)
            for (int64_t e = 0; states[k] && e < params[i].rows_stored * params[i].cols; e++)
                states[k][params[i].offset + e] = (float)(k + 1) + (float)(i * 4096 + e) * 0x1p-20f;
    }
}

/* Two models have the same parameters and optimizer state, padding rows included, bit for bit. */
static void assert_same_model(fixture *a, fixture *b) {
    int64_t num_params, num_buckets;
    const mt_param *params = mt_model_params(a->model, &num_params);
    mt_bucket *x = mt_model_buckets(a->model, &num_buckets), *y = mt_model_buckets(b->model, &num_buckets);
    for (int64_t i = 0; i < num_params; i++) {
        int64_t count = params[i].rows * params[i].cols, offset = params[i].offset, bucket = params[i].bucket;
        const mt_bucket *p = &x[bucket], *q = &y[bucket];
        int64_t size = mt_dtype_size(p->dtype);
        assert_memory_equal((char *)p->params + offset * size, (char *)q->params + offset * size, count * size);
        if (!p->trained) continue;
        const char *states[MT_NUM_STATES][2] = {{NULL}, {p->master, q->master}, {p->m, q->m}, {p->v, q->v}}, **both;
        for (int state = MT_STATE_MASTER; state < MT_NUM_STATES; state++) {
            int64_t bytes = mt_dtype_size(mt_state_dtype(a->model, (mt_param_state)state));
            both = states[state];
            if (both[0]) assert_memory_equal(both[0] + offset * bytes, both[1] + offset * bytes, count * bytes);
        }
    }
}

/* Changes a checkpoint to one of the version without checksums. */
static void make_older(const char *folder) {
    char command[1024];
    snprintf(command, sizeof command,
             "cd %s && rm checksums.json && sed -i 's/\"version\": 2/\"version\": 1/' trainer.json", folder);
    assert_int_equal(system(command), 0);
}

static mt_safetensors *open_tensors(const char *folder, const char *stem) {
    mt_safetensors *file;
    mt_error error;
    if (mt_safetensors_open_folder(&file, folder, stem, &error) != 0) fail_msg("%s", error.text);
    return file;
}

/* Two folders hold the same tensors: names, types, shapes, bytes. */
static void assert_same_tensors(const char *folder, const char *expected_folder) {
    mt_safetensors *file = open_tensors(folder, "model"), *expected = open_tensors(expected_folder, "model");
    assert_int_equal(mt_safetensors_count(file), mt_safetensors_count(expected));
    for (int64_t i = 0; i < mt_safetensors_count(file); i++) {
        const mt_tensor_info *x = mt_safetensors_get(file, i), *y = mt_safetensors_get(expected, i);
        assert_string_equal(x->name, y->name);
        assert_int_equal(x->dtype, y->dtype);
        assert_int_equal(x->num_dims, y->num_dims);
        assert_memory_equal(x->shape, y->shape, (size_t)x->num_dims * 8);
        if (x->bytes > 0) assert_memory_equal(x->data, y->data, x->bytes);
    }
    mt_safetensors_close(file);
    mt_safetensors_close(expected);
}

static void assert_same_bytes(const char *folder, const char *expected_folder, const char *name) {
    struct stat status, expected;
    char path[512], expected_path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    snprintf(expected_path, sizeof expected_path, "%s/%s", expected_folder, name);
    assert_int_equal(stat(path, &status), 0);
    assert_int_equal(stat(expected_path, &expected), 0);
    assert_int_equal(status.st_size, expected.st_size);
    char *x = read_file(folder, name, status.st_size), *y = read_file(expected_folder, name, status.st_size);
    assert_memory_equal(x, y, (size_t)status.st_size);
    free(x);
    free(y);
}

/* ---- folders made from the golden ones */

typedef struct changes {
    mt_dtype dtype;         // stored type of values
    const char *strip;      // removed from the front of names
    const char *drop;       // a tensor to omit
    const char *add[3];     // tensors to add, one value each
    mt_dtype add_dtype;     // their type
    const char *lengthen;   // a tensor whose last dimension is one larger
    const char *not_finite; // a tensor whose first value is NaN
    bool head;              // lm_head.weight is the embedding again,
    bool is_other;          // with another first value
    mt_dtype head_dtype;
} changes;

static void store(char *to, float value, mt_dtype dtype) {
    double wide = value;
    uint16_t half = dtype == MT_F16 ? mt_f32_to_f16(value) : mt_f32_to_bf16(value);
    memcpy(to,
           dtype == MT_F64   ? (void *)&wide
           : dtype == MT_F32 ? (void *)&value
                             : &half,
           (size_t)mt_dtype_size(dtype));
}

static float rounded(float value, mt_dtype dtype) {
    return dtype == MT_F16    ? mt_f16_to_f32(mt_f32_to_f16(value))
           : dtype == MT_BF16 ? mt_bf16_to_f32(mt_f32_to_bf16(value))
                              : value;
}

/* Writes to/model.safetensors: the family's tensors with changes, its header unpadded so that data is not aligned. */
static void write_changed(const char *family, const char *to, const changes *how) {
    static char header[1 << 16];
    char path[512], command[1024];
    int64_t used = 0, end = 0, size = mt_dtype_size(how->dtype);
    char *data = mt_malloc(1 << 24);
    snprintf(path, sizeof path, "tests/golden/hf/%s", family);
    snprintf(command, sizeof command, "mkdir -p %s && cp %s/config.json %s", to, path, to);
    assert_int_equal(system(command), 0);
    mt_safetensors *file = open_tensors(path, "model");
    for (int64_t i = 0; i < mt_safetensors_count(file); i++) {
        const mt_tensor_info *tensor = mt_safetensors_get(file, i);
        const char *name = tensor->name;
        int64_t count = tensor->bytes / 4, start = end;
        if (how->drop && strcmp(name, how->drop) == 0) continue;
        int64_t shape[2] = {tensor->shape[0], tensor->num_dims == 2 ? tensor->shape[1] : 1};
        if (how->lengthen && strcmp(name, how->lengthen) == 0) {
            shape[tensor->num_dims - 1]++;
            count = shape[0] * shape[1];
        }
        for (int64_t e = 0; e < count; e++, end += size) {
            float value = e < tensor->bytes / 4 ? ((const float *)tensor->data)[e] : 0;
            if (e == 0 && how->not_finite && strcmp(name, how->not_finite) == 0) value = NAN;
            store(data + end, value, how->dtype);
        }
        if (how->strip && strncmp(name, how->strip, strlen(how->strip)) == 0) name += strlen(how->strip);
        used += sprintf(header + used, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%d", used ? "," : "{", name,
                        mt_dtype_name(how->dtype), (int)shape[0]);
        if (tensor->num_dims == 2) used += sprintf(header + used, ",%d", (int)shape[1]);
        used += sprintf(header + used, "],\"data_offsets\":[%d,%d]}", (int)start, (int)end);
    }
    const mt_tensor_info *embedding = mt_safetensors_find(file, "model.embed_tokens.weight");
    if (how->head) {
        int64_t start = end;
        for (int64_t e = 0; e < embedding->bytes / 4; e++, end += mt_dtype_size(how->head_dtype))
            store(data + end, ((const float *)embedding->data)[e] + (float)(e == 0 && how->is_other), how->head_dtype);
        used += sprintf(
            header + used, ",\"lm_head.weight\":{\"dtype\":\"%s\",\"shape\":[%d,%d],\"data_offsets\":[%d,%d]}",
            mt_dtype_name(how->head_dtype), (int)embedding->shape[0], (int)embedding->shape[1], (int)start, (int)end);
    }
    for (int k = 0; k < 3 && how->add[k]; k++) {
        int64_t start = end;
        memset(data + end, 0, 8);
        end += mt_dtype_size(how->add_dtype);
        used += sprintf(header + used, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[1,1],\"data_offsets\":[%d,%d]}",
                        how->add[k], mt_dtype_name(how->add_dtype), (int)start, (int)end);
    }
    header[used++] = '}';
    if (used % 2 == 0) header[used++] = ' ';
    snprintf(path, sizeof path, "%s/model.safetensors", to);
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    fwrite(&used, 8, 1, out), fwrite(header, 1, (size_t)used, out), fwrite(data, 1, (size_t)end, out);
    assert_int_equal(fclose(out), 0);
    mt_safetensors_close(file);
    free(data);
}

/* ---- weights in and out */

static void every_family_comes_out_as_it_went_in(void **state) {
    (void)state;
    for (int k = 0; k < NUM_FAMILIES; k++) {
        fixture f = open_family(families[k], 4, 1, false), again = open_family(families[k], 4, 1, false);
        mt_run_state run = {0};
        create_model(&f, &mt_grid_of_one);
        save(&f, &run, at(families[k]));
        assert_same_tensors(at(families[k]), f.folder);
        assert_same_bytes(at(families[k]), f.folder, "model.safetensors"); // save_pretrained writes no other bytes
        create_model(&again, &mt_grid_of_one);
        spoil(&again);
        load(&again, &run, at(families[k]));
        assert_same_model(&f, &again);
        close_family(&f);
        close_family(&again);
    }
}

static void small_shards_hold_the_same_tensors(void **state) {
    (void)state;
    for (int k = 0; k < NUM_FAMILIES; k++) {
        mt_error error;
        fixture f = open_family(families[k], 4, 1, false);
        create_model(&f, &mt_grid_of_one);
        assert_int_equal(mkdir(at(families[k]), 0777), 0);
        assert_int_equal(mt_safetensors_save_folder(f.model, at(families[k]), "model", 20000, "--save", NULL, &error),
                         0);
        assert_true(count_entries(at(families[k]), "-of-0") > 3);
        assert_int_equal(mt_safetensors_save_folder(f.model, at(families[k]), "model", 20000, "--save", NULL, &error),
                         -1);
        assert_non_null(strstr(error.text, "exists")); // and is left as it was
        assert_same_tensors(at(families[k]), f.folder);
        close_family(&f);
    }
}

/* fp32, bf16, fp16 and fp64 files load their stored values exactly; a bf16 model keeps them as master weights. */
static void every_stored_type_loads_exactly(void **state) {
    (void)state;
    static const mt_dtype dtypes[] = {MT_F32, MT_BF16, MT_F16, MT_F64};
    for (int k = 0; k < 2 * 4; k++) {
        const char *family = k % 2 ? "gpt2" : "qwen3";
        changes how = {.dtype = dtypes[k / 2]};
        write_changed(family, at("source"), &how);
        fixture f = open_family(family, 4, 1, false), half = open_family(family, 4, 1, true);
        mt_run_state run;
        create_model(&f, &mt_grid_of_one);
        create_model(&half, &mt_grid_of_one);
        mt_safetensors *original = open_tensors(f.folder, "model");
        load(&f, &run, at("source"));
        load(&half, &run, at("source"));
        int64_t num_params, num_buckets;
        const mt_param *params = mt_model_params(f.model, &num_params);
        mt_bucket *buckets = mt_model_buckets(f.model, &num_buckets),
                  *halves = mt_model_buckets(half.model, &num_buckets);
        for (int64_t i = 0; i < num_params; i++) {
            const mt_param *p = &params[i];
            const float *data = mt_safetensors_find(original, p->hf_name)->data;
            for (int64_t r = 0; r < p->rows_stored; r++)
                for (int64_t c = 0; c < p->cols; c++) {
                    int64_t e = p->offset + r * p->cols + c;
                    float stored = rounded(data[stored_at(p, r, c)], how.dtype);
                    assert_true(((const float *)buckets[p->bucket].params)[e] == stored);
                    assert_true(((const float *)halves[p->bucket].master)[e] == stored);
                    assert_int_equal(((const uint16_t *)halves[p->bucket].params)[e], mt_f32_to_bf16(stored));
                }
        }
        mt_safetensors_close(original);
        close_family(&f);
        close_family(&half);
    }
}

/* One tensor of a file that is written. */
typedef struct written {
    char name[128];
    int64_t shape[MT_PARAM_DIMS + 1]; // 0 ends it
    char *data;
    int64_t bytes;
} written;

/* Appends the matrices ENDS of every expert of a layer, as one tensor. */
static void stack(written *out, const mt_safetensors *file, const char *layer, const char *name, const char *ends[3],
                  int64_t experts) {
    char of[160];
    int64_t parts = ends[1] ? 2 : 1;
    *out = (written){.shape = {experts}};
    snprintf(out->name, sizeof out->name, "%smlp.experts.%s", layer, name);
    for (int64_t i = 0; i < experts * parts; i++) {
        snprintf(of, sizeof of, "%s%s%d.%s.weight", layer, ends[2], (int)(i / parts), ends[i % parts]);
        const mt_tensor_info *matrix = mt_safetensors_find(file, of);
        assert_non_null(matrix);
        out->shape[1] = parts * matrix->shape[0], out->shape[2] = matrix->shape[1];
        out->data = mt_realloc(out->data, out->bytes + matrix->bytes);
        memcpy(out->data + out->bytes, matrix->data, (size_t)matrix->bytes);
        out->bytes += matrix->bytes;
    }
}

static void write_tensors(const char *folder, const written *tensors, int64_t count) {
    static char header[1 << 16];
    char path[512];
    int64_t used = 0, end = 0;
    for (const written *t = tensors; t < tensors + count; end += t++->bytes) {
        char shape[80];
        int length = snprintf(shape, sizeof shape, "%d", (int)t->shape[0]);
        for (int k = 1; t->shape[k] > 0; k++)
            length += snprintf(shape + length, sizeof shape - (size_t)length, ",%d", (int)t->shape[k]);
        used += snprintf(header + used, sizeof header - (size_t)used,
                         "%s\"%s\":{\"dtype\":\"F32\",\"shape\":[%s],\"data_offsets\":[%d,%d]}", used ? "," : "{",
                         t->name, shape, (int)end, (int)(end + t->bytes));
        assert_true(used + 1 < (int64_t)sizeof header);
    }
    header[used++] = '}';
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    fwrite(&used, 8, 1, out), fwrite(header, 1, (size_t)used, out);
    for (const written *t = tensors; t < tensors + count; t++) fwrite(t->data, 1, (size_t)t->bytes, out);
    assert_int_equal(fclose(out), 0);
}

/* Writes a family's folder as transformers 5 does with save_original_format=False. With `transposed` the last two
 * dimensions of these tensors are exchanged; `experts_less` leaves experts out. */
static void write_stacked(const fixture *f, const char *to, bool transposed, int64_t experts_less) {
    static const char *const of_mixtral[2][3] = {{"w1", "w3", "block_sparse_moe.experts."},
                                                 {"w2", NULL, "block_sparse_moe.experts."}};
    static const char *const of_others[2][3] = {{"gate_proj", "up_proj", "mlp.experts."},
                                                {"down_proj", NULL, "mlp.experts."}};
    /* Ends of names that transformers 5 has otherwise in memory, of all families or of one. */
    static const struct {
        mt_hf_family family;
        const char *end, *in_memory;
    } renamed[] = {{MT_HF_UNKNOWN, "block_sparse_moe.gate.weight", "mlp.gate.weight"},
                   {MT_HF_UNKNOWN, "block_sparse_moe.e_score_correction_bias", "mlp.e_score_correction_bias"},
                   {MT_HF_HY_V3, "mlp.router.gate.weight", "mlp.gate.weight"},
                   {MT_HF_HY_V3, "mlp.expert_bias", "mlp.e_score_correction_bias"},
                   {MT_HF_HY_V3, "mlp.shared_mlp.gate_proj.weight", "mlp.shared_experts.gate_proj.weight"},
                   {MT_HF_HY_V3, "mlp.shared_mlp.up_proj.weight", "mlp.shared_experts.up_proj.weight"},
                   {MT_HF_HY_V3, "mlp.shared_mlp.down_proj.weight", "mlp.shared_experts.down_proj.weight"},
                   {MT_HF_EXAONE_MOE, "mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"},
                   {MT_HF_ERNIE4_5_MOE, "mlp.moe_statics.e_score_correction_bias",
                    "mlp.gate.moe_statics.e_score_correction_bias"}};
    static written tensors[512];
    bool is_mixtral = f->options.stack.hf_family == MT_HF_MIXTRAL || f->options.stack.hf_family == MT_HF_MINIMAX_M2;
    int64_t count = 0, first_stacked;
    char command[1024], layer[64];
    snprintf(command, sizeof command, "mkdir -p %s && cp %s/config.json %s", to, f->folder, to);
    assert_int_equal(system(command), 0);
    mt_safetensors *file = open_tensors(f->folder, "model");
    for (int64_t i = 0; i < mt_safetensors_count(file); i++) {
        const mt_tensor_info *tensor = mt_safetensors_get(file, i);
        if (strstr(tensor->name, ".experts.")) continue;
        written *t = &tensors[count++];
        *t = (written){.shape = {0}};
        for (int k = 0; k < tensor->num_dims; k++) t->shape[k] = tensor->shape[k];
        snprintf(t->name, sizeof t->name, "%s", tensor->name);
        for (size_t k = 0; k < sizeof renamed / sizeof *renamed; k++) {
            const char *end = strstr(tensor->name, renamed[k].end);
            if (!end || (renamed[k].family != MT_HF_UNKNOWN && renamed[k].family != f->options.stack.hf_family))
                continue;
            snprintf(t->name, sizeof t->name, "%.*s%s", (int)(end - tensor->name), tensor->name, renamed[k].in_memory);
        }
        t->data = memcpy(mt_malloc(tensor->bytes), tensor->data, (size_t)tensor->bytes), t->bytes = tensor->bytes;
    }
    first_stacked = count;
    for (int64_t i = 0; i < f->options.stack.num_layers; i++) {
        const char *const(*ends)[3] = is_mixtral ? of_mixtral : of_others;
        char first[160];
        bool beside = f->options.stack.vision.tower != MT_VISION_NONE; // a tower
        snprintf(layer, sizeof layer, "model.%slayers.%d.", beside ? "language_model." : "", (int)i);
        snprintf(first, sizeof first, "%s%s0.%s.weight", layer, ends[0][2], ends[0][0]);
        if (!mt_safetensors_find(file, first)) continue; // a dense layer
        for (int k = 0; k < 2; k++)
            stack(&tensors[count++], file, layer, k ? "down_proj" : "gate_up_proj", (const char **)ends[k],
                  f->options.stack.num_experts - experts_less);
    }
    assert_true(count > first_stacked);
    for (written *t = tensors + first_stacked; transposed && t < tensors + count; t++) {
        int64_t rows = t->shape[1];
        t->shape[1] = t->shape[2], t->shape[2] = rows;
    }
    write_tensors(to, tensors, count);
    for (int64_t i = 0; i < count; i++) free(tensors[i].data);
    mt_safetensors_close(file);
}

/* Saved again, each expert is apart, which every version of transformers reads. */
static void stacked_experts_load_and_are_saved_apart(void **state) {
    (void)state;
    static const char *const moe[] = {
        "mixtral",      "qwen2_moe",  "qwen3_moe",  "deepseek_v3",          "glm4_moe", "hy_v3", "exaone_moe",
        "ernie4_5_moe", "minimax_m2", "qwen3_next", "../vision/qwen3_5_moe"};
    for (size_t k = 0; k < sizeof moe / sizeof *moe; k++) {
        char name[32];
        snprintf(name, sizeof name, "apart_%d", (int)k);
        fixture f = open_family(moe[k], 4, 1, false);
        mt_run_state run = {0};
        create_model(&f, &mt_grid_of_one);
        write_stacked(&f, at("stacked"), false, 0);
        spoil(&f);
        load(&f, &run, at("stacked"));
        save(&f, &run, at(name));
        assert_same_tensors(at(name), f.folder);
        write_stacked(&f, at("stacked"), true, 0);
        assert_load_fails(&f, at("stacked"), "_proj\" has all experts of a layer and must be");
        assert_load_fails(&f, at("stacked"), "but is transposed"); // a square one does not hide the other
        write_stacked(&f, at("stacked"), false, 1);
        assert_load_fails(&f, at("stacked"), "has all experts of a layer and must be");
        close_family(&f);
    }
    fixture dense = open_family("qwen3", 4, 1, false);
    create_model(&dense, &mt_grid_of_one);
    assert_load_fails(&dense, at("stacked"), "check ");
    close_family(&dense);
}

/* A folder as the hub has Qwen3.5: the text model beside a vision tower and a module of multi-token prediction. */
static void write_beside_vision(const fixture *f, const char *folder) {
    static char towers[2][16];
    char path[512];
    mt_safetensors *file = open_tensors(f->folder, "model");
    int64_t count = mt_safetensors_count(file);
    written *tensors = mt_calloc((count + 2) * (int64_t)sizeof *tensors);
    for (int64_t i = 0; i < count; i++) {
        const mt_tensor_info *from = mt_safetensors_get(file, i);
        bool inner = strncmp(from->name, "model.", 6) == 0;
        snprintf(tensors[i].name, sizeof tensors[i].name, "%s%s", inner ? "model.language_model." : "",
                 from->name + (inner ? 6 : 0));
        memcpy(tensors[i].shape, from->shape, (size_t)from->num_dims * 8);
        tensors[i].data = (char *)from->data, tensors[i].bytes = from->bytes;
    }
    tensors[count] = (written){"model.visual.blocks.0.attn.proj.weight", {4}, towers[0], 16};
    tensors[count + 1] = (written){"mtp.norm.weight", {4}, towers[1], 16};
    mkdir(folder, 0755);
    write_tensors(folder, tensors, count + 2);
    snprintf(path, sizeof path, "%s/config.json", f->folder);
    json_t *text = json_load_file(path, 0, NULL), *whole = json_object();
    const char *type = json_string_value(json_object_get(text, "model_type"));
    json_object_del(text, "architectures");
    json_object_set_new(whole, "tie_word_embeddings", json_incref(json_object_get(text, "tie_word_embeddings")));
    json_object_del(text, "tie_word_embeddings");
    json_object_set_new(whole, "model_type", json_stringn(type, strlen(type) - strlen("_text")));
    json_object_set_new(whole, "text_config", text);
    json_object_set_new(whole, "vision_config", json_object());
    snprintf(path, sizeof path, "%s/config.json", folder);
    assert_int_equal(json_dump_file(whole, path, 0), 0);
    json_decref(whole), free(tensors);
    mt_safetensors_close(file);
}

static void the_text_model_beside_a_vision_tower_is_read(void **state) {
    (void)state;
    static const char *const names[] = {"qwen3_5", "qwen3_5_moe"};
    for (int k = 0; k < 2; k++) {
        fixture f = open_family(names[k], 4, 1, false);
        write_beside_vision(&f, at("hub"));
        char path[300];
        mt_error error;
        mt_run_options o;
        snprintf(path, sizeof path, "%s/config.json", at("hub"));
        json_t *whole = json_load_file(path, 0, NULL);
        char *json = json_dumps(whole, 0);
        json_decref(whole);
        mt_options_default(&o);
        o.language_model_only = true;
        if (mt_options_read_hf_config(&o, json, (int64_t)strlen(json), path, &error) != 0) fail_msg("%s", error.text);
        assert_int_equal(o.stack.vision.tower, MT_VISION_NONE);
        assert_int_equal(o.stack.hf_family, f.options.stack.hf_family);
        assert_int_equal(o.stack.untie_embeddings_and_output_weights,
                         f.options.stack.untie_embeddings_and_output_weights);
        assert_string_equal(o.linear_attention_freq, f.options.linear_attention_freq);
        mt_options_free(&o);
        free(json);
        mt_run_state run = {0};
        create_model(&f, &mt_grid_of_one);
        spoil(&f);
        load(&f, &run, at("hub"));
        save(&f, &run, at("text"));
        assert_same_tensors(at("text"), f.folder);
        close_family(&f);
    }
}

/* Released files name the MLP of a dense layer otherwise than transformers 5 does. */
static void released_names_of_dense_layers_are_read(void **state) {
    (void)state;
    static const char *const ends[] = {"gate_proj.weight", "up_proj.weight", "down_proj.weight"};
    fixture f = open_family("kimi_linear", 4, 1, false);
    mt_safetensors *file = open_tensors(f.folder, "model");
    int64_t count = mt_safetensors_count(file), renamed = 0;
    written *tensors = mt_calloc(count * (int64_t)sizeof *tensors);
    for (int64_t i = 0; i < count; i++) {
        const mt_tensor_info *from = mt_safetensors_get(file, i);
        snprintf(tensors[i].name, sizeof tensors[i].name, "%s", from->name);
        for (int k = 0; k < 3; k++) {
            char name[128];
            snprintf(name, sizeof name, "model.layers.0.block_sparse_moe.%.40s", ends[k]);
            if (strcmp(name, from->name) != 0) continue;
            snprintf(tensors[i].name, sizeof tensors[i].name, "model.layers.0.mlp.%.40s", ends[k]);
            renamed++;
        }
        memcpy(tensors[i].shape, from->shape, (size_t)from->num_dims * 8);
        tensors[i].data = (char *)from->data, tensors[i].bytes = from->bytes;
    }
    assert_int_equal(renamed, 3);
    mkdir(at("released"), 0755);
    write_tensors(at("released"), tensors, count);
    char path[512];
    snprintf(path, sizeof path, "%s/config.json", f.folder);
    json_t *config = json_load_file(path, 0, NULL);
    snprintf(path, sizeof path, "%s/config.json", at("released"));
    assert_int_equal(json_dump_file(config, path, 0), 0);
    json_decref(config);
    mt_run_state run = {0};
    create_model(&f, &mt_grid_of_one);
    spoil(&f);
    load(&f, &run, at("released"));
    save(&f, &run, at("again"));
    assert_same_tensors(at("again"), f.folder);
    free(tensors);
    mt_safetensors_close(file);
    close_family(&f);
}

static void rows_that_pad_the_vocabulary_become_zero(void **state) {
    (void)state;
    fixture f = open_family("llama", 4, 1, true);
    create_model(&f, &mt_grid_of_one);
    spoil(&f);
    mt_run_state run;
    load(&f, &run, f.folder);
    int64_t num_params, num_buckets, padding = 0;
    const mt_param *params = mt_model_params(f.model, &num_params);
    mt_bucket *buckets = mt_model_buckets(f.model, &num_buckets);
    for (int64_t i = 0; i < num_params; i++)
        for (int64_t e = params[i].rows_stored * params[i].cols; e < params[i].rows * params[i].cols; e++, padding++) {
            assert_int_equal(((uint16_t *)buckets[params[i].bucket].params)[params[i].offset + e], 0);
            assert_true(((float *)buckets[params[i].bucket].master)[params[i].offset + e] == 0);
        }
    assert_int_equal(padding, 2 * (f.options.stack.padded_vocab_size - 160) * 32);
    assert_true(padding > 0);
    close_family(&f);
}

/* Like openai-community/gpt2: names without "transformer.", masks among the weights. */
static void names_without_their_prefix_and_old_masks_load(void **state) {
    (void)state;
    changes gpt2 = {.strip = "transformer.", .add = {"h.0.attn.bias", "h.3.attn.masked_bias"}};
    changes llama = {.strip = "model.", .add = {"layers.0.self_attn.rotary_emb.inv_freq"}, .head = true};
    const char *const names[] = {"gpt2", "llama3_rope_tied"};
    for (int k = 0; k < 2; k++) {
        write_changed(names[k], at(names[k]), k ? &llama : &gpt2);
        fixture f = open_family(names[k], 4, 1, false);
        mt_run_state run = {0};
        create_model(&f, &mt_grid_of_one);
        spoil(&f);
        load(&f, &run, at(names[k]));
        save(&f, &run, at("saved"));
        assert_same_tensors(at("saved"), f.folder);
        close_family(&f);
    }
}

/* The head of a tied folder is the embedding, in any type, or it is refused: transformers uses the head that is there.
 * Alone it is both. */
static void a_tied_folder_has_one_embedding(void **state) {
    (void)state;
    static const changes same[] = {{.head = true},
                                   {.head = true, .head_dtype = MT_F64},
                                   {.head = true, .drop = "model.embed_tokens.weight"}},
                         other[] = {{.head = true, .is_other = true},
                                    {.head = true, .is_other = true, .head_dtype = MT_F64},
                                    {.add = {"lm_head.weight"}}};
    fixture f = open_family("llama3_rope_tied", 4, 1, false);
    mt_run_state run = {0};
    create_model(&f, &mt_grid_of_one);
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        write_changed("llama3_rope_tied", at("tied"), &same[i]);
        spoil(&f);
        load(&f, &run, at("tied"));
        save(&f, &run, at("saved"));
        assert_same_tensors(at("saved"), f.folder);
        write_changed("llama3_rope_tied", at("tied"), &other[i]);
        assert_load_fails(&f, at("tied"), "\"lm_head.weight\" is not the same as \"model.embed_tokens.weight\"");
    }
    close_family(&f);
    f = open_family("llama", 4, 1, false);
    create_model(&f, &mt_grid_of_one);
    write_changed("llama", at("untied"), &(changes){.drop = "model.embed_tokens.weight"});
    assert_load_fails(&f, at("untied"), "no tensor \"model.embed_tokens.weight\"");
    close_family(&f);
}

static void weights_that_do_not_fit_are_refused_by_name(void **state) {
    (void)state;
    static const struct {
        changes how;
        const char *words;
    } cases[] = {
        {{.drop = "model.layers.2.self_attn.k_proj.weight"}, "no tensor \"model.layers.2.self_attn.k_proj.weight\""},
        {{.drop = "lm_head.weight"}, "tie_word_embeddings"},
        {{.lengthen = "model.layers.1.mlp.up_proj.weight"},
         "is [80, 33] and the model's [80, 32]; check --hidden-size"},
        {{.lengthen = "model.layers.1.mlp.down_proj.weight"}, "check --ffn-hidden-size"},
        {{.lengthen = "model.norm.weight"}, "is [33] and the model's [32]"},
        {{.add = {"model.layers.4.input_layernorm.weight"}}, "\"model.layers.4.input_layernorm.weight\" has no place"},
        {{.add = {"model.layers.0.self_attn.q_proj.bias"}}, "\"model.layers.0.self_attn.q_proj.bias\" has no place"},
        {{.drop = "lm_head.weight", .add = {"lm_head.weight"}, .add_dtype = MT_I8}, "is I8; weights may be"},
    };
    fixture f = open_family("llama", 4, 1, false);
    create_model(&f, &mt_grid_of_one);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_changed("llama", at("changed"), &cases[i].how);
        assert_load_fails(&f, at("changed"), cases[i].words);
    }
    close_family(&f);
}

static void values_that_are_not_finite_are_reported(void **state) {
    (void)state;
    changes how = {.not_finite = "model.norm.weight"};
    write_changed("llama", at("source"), &how);
    fixture f = open_family("llama", 4, 1, false);
    create_model(&f, &mt_grid_of_one);
    mt_run_state run;
    fflush(stderr);
    int before = dup(2);
    assert_non_null(freopen(at("stderr"), "w", stderr));
    load(&f, &run, at("source"));
    fflush(stderr);
    dup2(before, 2);
    close(before);
    char text[512] = {0};
    FILE *file = fopen(at("stderr"), "r");
    assert_true(fread(text, 1, sizeof text - 1, file) > 0);
    fclose(file);
    assert_non_null(strstr(text, "warning: "));
    assert_non_null(strstr(text, "1 values of tensor \"model.norm.weight\" are not finite"));
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
    close_family(&f);
}

/* ---- saving */

static void the_folder_itself_becomes_a_hugging_face_folder(void **state) {
    (void)state;
    char link[64] = {0};
    fixture f = open_family("llama", 4, 1, false);
    create_model(&f, &mt_grid_of_one);
    mt_run_state run = {.iteration = 10};
    save(&f, &run, at("deep/er/out"));
    assert_same_tensors(at("deep/er/out"), f.folder);
    assert_same_tensors(at("deep/er/out/iter_0000010"), f.folder);
    assert_true(readlink(at("deep/er/out/latest"), link, sizeof link) > 0);
    assert_string_equal(link, "iter_0000010");
    assert_true(exists(at("deep/er/out/config.json")));
    assert_true(exists(at("deep/er/out/generation_config.json")));
    assert_true(exists(at("deep/er/out/model.safetensors.index.json")));
    assert_false(exists(at("deep/er/out/trainer.json")));
    assert_false(exists(at("deep/er/out/optimizer.safetensors")));
    mt_error error;
    char *resolved = mt_checkpoint_resolve(at("deep/er/out"), &error);
    assert_string_equal(resolved, at("deep/er/out/iter_0000010"));
    free(resolved);
    close_family(&f);
}

static int add_tokenizer(void *context, const char *folder, mt_error *error) {
    char path[512];
    if (!context) return mt_error_set(error, "tokenizer: is lost; find it");
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    write_text(path, context);
    return 0;
}

static void the_latest_moves_on_and_links_that_are_stale_go(void **state) {
    (void)state;
    mt_error error;
    fixture f = open_family("llama", 4, 1, false);
    create_model(&f, &mt_grid_of_one);
    mt_run_state run = {.iteration = 1};
    assert_int_equal(mt_checkpoint_save(f.model, &f.options, &run, at("out"), add_tokenizer, "{}", &error), 0);
    assert_true(exists(at("out/tokenizer.json")));
    write_text(at("out/notes.txt"), "the user's own");
    run.iteration = 2;
    save(&f, &run, at("out"));
    assert_false(exists(at("out/tokenizer.json")));
    assert_true(exists(at("out/iter_0000001/tokenizer.json")));
    assert_true(exists(at("out/notes.txt")));
    char *resolved = mt_checkpoint_resolve(at("out"), &error);
    assert_string_equal(resolved, at("out/iter_0000002"));
    free(resolved);
    close_family(&f);
}

static void saving_an_iteration_again_replaces_it_whole(void **state) {
    (void)state;
    mt_error error;
    fixture f = open_family("llama", 4, 1, false);
    create_model(&f, &mt_grid_of_one);
    mt_run_state run = {.iteration = 3};
    assert_int_equal(mt_checkpoint_save(f.model, &f.options, &run, at("out"), add_tokenizer, "{}", &error), 0);
    run.consumed_train_samples = 77;
    save(&f, &run, at("out"));
    assert_false(exists(at("out/iter_0000003/tokenizer.json")));
    assert_int_equal(count_entries(at("out"), "iter_"), 1);
    load(&f, &run, at("out"));
    assert_int_equal(run.consumed_train_samples, 77);
    close_family(&f);
}

static void what_a_killed_run_left_is_removed_and_nothing_else(void **state) {
    (void)state;
    fixture f = open_family("llama", 4, 1, false);
    create_model(&f, &mt_grid_of_one);
    mt_run_state run = {.iteration = 1};
    const char *const others[] = {"out/iter_0000008", "out/iter_0000007.tmp-x", "out/my.tmp-1", "out/iter_.tmp-1"};
    assert_int_equal(mkdir(at("out"), 0777), 0);
    for (int i = 0; i < 4; i++) assert_int_equal(mkdir(at(others[i]), 0777), 0);
    assert_int_equal(mkdir(at("out/iter_0000009.tmp-12345"), 0777), 0);
    assert_int_equal(mkdir(at("out/iter_0000009.tmp-12345/sub"), 0777), 0);
    write_text(at("out/iter_0000009.tmp-12345/sub/file"), "half");
    write_text(at("out/latest_checkpointed_iteration.txt.tmp-12345"), "9");
    assert_int_equal(symlink("iter_0000009", at("out/latest.tmp-12345")), 0);
    assert_int_equal(symlink("latest/config.json", at("out/config.json.tmp-12345")), 0);
    save(&f, &run, at("out"));
    assert_false(exists(at("out/iter_0000009.tmp-12345")));
    assert_int_equal(count_entries(at("out"), "12345"), 0);
    for (int i = 0; i < 4; i++) assert_true(exists(at(others[i])));
    close_family(&f);
}

static void someone_elses_model_is_not_overwritten(void **state) {
    (void)state;
    changes none = {0};
    fixture f = open_family("llama", 4, 1, false);
    create_model(&f, &mt_grid_of_one);
    write_changed("llama", at("model"), &none);
    assert_save_fails(&f, at("model"), "choose another --save");
    assert_same_tensors(at("model"), f.folder);
    assert_int_equal(count_entries(at("model"), "iter_"), 0);
    assert_int_equal(mkdir(at("other"), 0777), 0);
    assert_int_equal(mkdir(at("other/latest"), 0777), 0);
    assert_save_fails(&f, at("other"), "other/latest: is not a link");
    assert_int_equal(mkdir(at("third"), 0777), 0);
    assert_int_equal(mkdir(at("third/latest_checkpointed_iteration.txt"), 0777), 0);
    write_text(at("file"), "");
    mt_error error;
    assert_int_equal(mt_checkpoint_prepare(f.model, &f.options, at("model"), &error), -1);
    assert_says(&error, "is a model's own folder");
    assert_int_equal(mt_checkpoint_prepare(f.model, &f.options, at("third"), &error), -1);
    assert_says(&error, "third/latest_checkpointed_iteration.txt: is a folder");
    assert_int_equal(mt_checkpoint_prepare(f.model, &f.options, at("new/one"), &error), 0);
    assert_save_fails(&f, at("file"), "cannot be made");
    assert_save_fails(&f, at("file/out"), "cannot be made");
    close_family(&f);
}

/* The disk is "full" after `bytes` of a file; the checkpoint before must still exist and load. */
static void a_full_disk_leaves_the_checkpoint_before(void **state) {
    (void)state;
    fixture f = open_family("llama", 4, 1, false);
    create_model(&f, &mt_grid_of_one);
    mt_run_state run = {.iteration = 6};
    save(&f, &run, at("out"));
    struct rlimit before, limit;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, SIG_IGN);
    for (rlim_t bytes = 0; bytes < 400000; bytes = bytes * 3 + 500) {
        limit = (struct rlimit){bytes, before.rlim_max};
        setrlimit(RLIMIT_FSIZE, &limit);
        mt_error error;
        mt_run_state later = {.iteration = 7};
        int status = mt_checkpoint_save(f.model, &f.options, &later, at("out"), NULL, NULL, &error);
        setrlimit(RLIMIT_FSIZE, &before);
        assert_int_equal(status, -1);
        assert_says(&error, "too large for the limit on file sizes");
        assert_int_equal(count_entries(at("out"), "iter_"), 1);
        assert_int_equal(count_entries(at("out"), "tmp"), 0);
        load(&f, &run, at("out"));
        assert_int_equal(run.iteration, 6);
    }
    close_family(&f);
}

static void a_failing_addition_leaves_the_checkpoint_before(void **state) {
    (void)state;
    mt_error error;
    fixture f = open_family("llama", 4, 1, false);
    create_model(&f, &mt_grid_of_one);
    mt_run_state run = {.iteration = 6};
    save(&f, &run, at("out"));
    assert_int_equal(mt_checkpoint_save(f.model, &f.options, &run, at("out"), add_tokenizer, NULL, &error), -1);
    assert_string_equal(error.text, "tokenizer: is lost; find it");
    assert_int_equal(count_entries(at("out"), "iter_"), 1);
    load(&f, &run, at("out"));
    close_family(&f);
}

/* ---- resuming */

static void moments_masters_and_the_place_in_the_run_return_bit_for_bit(void **state) {
    (void)state;
    for (int k = 0; k < 2 * NUM_FAMILIES; k++) {
        fixture f = open_family(families[k / 2], 4, 1, k % 2), again = open_family(families[k / 2], 4, 1, k % 2);
        mt_run_state run = {
            .iteration = 5, .consumed_train_samples = 40, .consumed_valid_samples = 8, .optimizer_step = 4};
        create_model(&f, &mt_grid_of_one);
        create_model(&again, &mt_grid_of_one);
        fill_state(&f);
        save(&f, &run, at("out"));
        spoil(&again);
        mt_run_state loaded = {0};
        load(&again, &loaded, at("out"));
        assert_memory_equal(&loaded, &run, sizeof run);
        assert_same_model(&f, &again);
        close_family(&f);
        close_family(&again);
    }
}

static void train_steps(fixture *f, mt_run_state *run, int64_t first, int64_t count) {
    mt_metrics metrics;
    mt_error error;
    for (int64_t step = first; step < first + count; step++) {
        source from = {f, step, SEQUENCES, 0, SEQUENCES};
        if (mt_train_step(f->model, run, 1, next_micro_batch, &from, &f->batch, &metrics, &error) != 0)
            fail_msg("%s", error.text);
    }
}

static void a_resumed_run_continues_bit_for_bit(void **state) {
    (void)state;
    for (int k = 0; k < 2 * NUM_FAMILIES; k++) {
        fixture f = open_family(families[k / 2], 4, 1, k % 2), again = open_family(families[k / 2], 4, 1, k % 2);
        mt_run_state run = {0}, resumed = {0};
        create_model(&f, &mt_grid_of_one);
        create_model(&again, &mt_grid_of_one);
        train_steps(&f, &run, 0, 3);
        save(&f, &run, at("out"));
        load(&again, &resumed, at("out"));
        train_steps(&f, &run, 3, 3);
        train_steps(&again, &resumed, 3, 3);
        assert_memory_equal(&resumed, &run, sizeof run);
        assert_same_model(&f, &again);
        close_family(&f);
        close_family(&again);
    }
}

/* The first moment of the first parameter: 0 in a fresh optimizer. */
static float first_moment(fixture *f) {
    int64_t count;
    return *(const float *)mt_model_buckets(f->model, &count)[0].m;
}

static void options_say_what_a_run_takes_over(void **state) {
    (void)state;
    fixture f = open_family("llama", 4, 1, false);
    create_model(&f, &mt_grid_of_one);
    fill_state(&f);
    mt_run_state run = {.iteration = 5, .consumed_train_samples = 40, .optimizer_step = 4}, loaded;
    save(&f, &run, at("out"));
    static const struct {
        bool finetune, no_load_optim;
        int64_t iteration, samples, optimizer_step;
        bool moments;
    } cases[] = {{false, false, 5, 40, 4, true},
                 {true, false, 0, 0, 0, false},
                 {false, true, 5, 40, 0, false},
                 {true, true, 0, 0, 0, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fixture again = open_family("llama", 4, 1, false);
        create_model(&again, &mt_grid_of_one);
        again.options.finetune = cases[i].finetune, again.options.no_load_optim = cases[i].no_load_optim;
        load(&again, &loaded, at("out"));
        assert_int_equal(loaded.iteration, cases[i].iteration);
        assert_int_equal(loaded.consumed_train_samples, cases[i].samples);
        assert_int_equal(loaded.optimizer_step, cases[i].optimizer_step);
        assert_int_equal(first_moment(&again) != 0, cases[i].moments);
        close_family(&again);
    }
    f.options.no_save_optim = true;
    save(&f, &run, at("small"));
    assert_int_equal(count_entries(at("small/iter_0000005"), "optimizer"), 0);
    assert_load_fails(&f, at("small"), "iter_0000005: was saved without the optimizer's state");
    f.options.no_load_optim = true;
    load(&f, &loaded, at("small"));
    assert_int_equal(loaded.iteration, 5);
    assert_int_equal(loaded.optimizer_step, 0);
    f.options.no_load_optim = false, f.options.finetune = true;
    load(&f, &loaded, at("small"));
    assert_int_equal(loaded.iteration, 0);
    close_family(&f);
}

/* fp32 to bf16 keeps every weight as master weight; bf16 to fp32 continues from the master weights. */
static void a_run_may_change_its_precision(void **state) {
    (void)state;
    int64_t num_params, num_buckets;
    for (int to_bf16 = 0; to_bf16 < 2; to_bf16++) {
        fixture f = open_family("gpt2", 4, 1, !to_bf16), again = open_family("gpt2", 4, 1, to_bf16);
        mt_run_state run = {.iteration = 5};
        create_model(&f, &mt_grid_of_one);
        create_model(&again, &mt_grid_of_one);
        fill_state(&f);
        save(&f, &run, at("out"));
        load(&again, &run, at("out"));
        const mt_param *params = mt_model_params(f.model, &num_params);
        mt_bucket *from = mt_model_buckets(f.model, &num_buckets), *to = mt_model_buckets(again.model, &num_buckets);
        for (int64_t i = 0; i < num_params; i++) {
            const mt_bucket *x = &from[params[i].bucket], *y = &to[params[i].bucket];
            const float *expected = to_bf16 ? x->params : x->master, *actual = to_bf16 ? y->master : y->params;
            int64_t offset = params[i].offset, bytes = params[i].rows * params[i].cols * 4;
            assert_memory_equal(expected + offset, actual + offset, bytes);
            assert_memory_equal((char *)x->v + offset * 4, (char *)y->v + offset * 4, bytes);
        }
        close_family(&f);
        close_family(&again);
    }
}

static void a_damaged_checkpoint_is_named_with_the_remedy(void **state) {
    (void)state;
    fixture f = open_family("llama", 4, 1, false);
    create_model(&f, &mt_grid_of_one);
    mt_run_state run = {.iteration = 5};
    assert_load_fails(&f, at("absent"), "No such file or directory; name a folder");
    write_text(at("file"), "");
    assert_load_fails(&f, at("file"), "is a file, not a folder");
    assert_int_equal(mkdir(at("empty"), 0777), 0);
    assert_load_fails(&f, at("empty"), "holds neither config.json nor latest_checkpointed_iteration.txt");
    static const struct {
        const char *folder, *file, *answer;
    } foreign[] = {
        {"maker", "maker/consolidated.00.pth", "(consolidated.*); name the Hugging Face folder of the same model"},
        {"mistral", "mistral/consolidated.safetensors", "(consolidated.*); name the Hugging Face folder"},
        {"deepspeed", "deepspeed/zero_to_fp32.py", "is a checkpoint of DeepSpeed; make a Hugging Face folder of it"},
        {"gguf", "gguf/m.gguf", "has the format GGUF of llama.cpp; name the Hugging Face folder"},
        {"gguf/m.gguf", NULL, "has the format GGUF of llama.cpp; name the Hugging Face folder"}};
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++) {
        if (foreign[i].file) assert_int_equal(mkdir(at(foreign[i].folder), 0777), 0);
        if (foreign[i].file) write_text(at(foreign[i].file), "");
        assert_load_fails(&f, at(foreign[i].folder), foreign[i].answer);
    }
    save(&f, &run, at("out"));
    static const char *const latests[] = {"", "release", "5x", "-5", "99999999999999999999", "5 6"};
    for (size_t i = 0; i < sizeof latests / sizeof *latests; i++) {
        write_text(at("out/latest_checkpointed_iteration.txt"), latests[i]);
        assert_load_fails(&f, at("out"), "latest_checkpointed_iteration.txt: holds no iteration number");
    }
    write_text(at("out/latest_checkpointed_iteration.txt"), "6");
    assert_load_fails(&f, at("out"), "iter_0000006: has no config.json");
    write_text(at("out/latest_checkpointed_iteration.txt"), " 5 \n");
    assert_load_fails(&f, at("out"), "holds no iteration number");
    write_text(at("out/latest_checkpointed_iteration.txt"), "5");
    load(&f, &run, at("out"));
    f.options.stack.seed++;
    assert_load_fails(&f, at("out"), "trainer.json: the run was begun with --seed");
    f.options.stack.seed--, f.options.stack.seq_length++;
    assert_load_fails(&f, at("out"), "trainer.json: the run was begun with --seq-length 32, not 33");
    f.options.stack.seq_length--;
    assert_int_equal(unlink(at("out/iter_0000005/checksums.json")), 0);
    assert_load_fails(&f, at("out"), "damaged: its checksums.json is not there");
    write_text(at("out/iter_0000005/trainer.json"), "{\"version\":1,\"iteration\":\"five\"}");
    assert_load_fails(&f, at("out"), "trainer.json: has no whole number \"iteration\"; begin anew");
    write_text(at("out/iter_0000005/trainer.json"), "{");
    assert_load_fails(&f, at("out"), "trainer.json: damaged: it is not JSON");
    unlink(at("out/iter_0000005/trainer.json"));
    assert_load_fails(&f, at("out"), "iter_0000005: damaged: its trainer.json is not there");
    f.options.finetune = true;
    load(&f, &run, at("out"));
    assert_int_equal(run.iteration, 0);
    close_family(&f);
}

/* The optimizer's state of another iteration, laid beside weights that were saved without one, has no checksum. */
static void a_file_from_elsewhere_is_refused(void **state) {
    (void)state;
    fixture f = open_family("llama", 4, 1, false);
    char command[2048];
    create_model(&f, &mt_grid_of_one);
    mt_run_state run = {.iteration = 4};
    save(&f, &run, at("out"));
    f.options.no_save_optim = true, run.iteration = 5;
    save(&f, &run, at("out"));
    f.options.no_save_optim = false;
    snprintf(command, sizeof command, "cp %s/optimizer.safetensors* ", at("out/iter_0000004"));
    snprintf(command + strlen(command), sizeof command - strlen(command), "%s", at("out/iter_0000005"));
    assert_int_equal(system(command), 0);
    assert_load_fails(&f, at("out"), "damaged: its checksums.json does not list optimizer.safetensors");
    write_text(at("out/iter_0000004/tokenizer.json"), "{}"); // no file of a checkpoint's own
    write_text(at("out/latest_checkpointed_iteration.txt"), "4");
    load(&f, &run, at("out"));
    assert_int_equal(run.iteration, 4);
    close_family(&f);
}

static void without_the_tracker_the_newest_whole_checkpoint_is_loaded(void **state) {
    (void)state;
    fixture f = open_family("llama", 4, 1, false);
    create_model(&f, &mt_grid_of_one);
    mt_run_state run = {.iteration = 5};
    for (run.iteration = 5; run.iteration <= 7; run.iteration++) save(&f, &run, at("out"));
    assert_int_equal(unlink(at("out/latest_checkpointed_iteration.txt")), 0);
    load(&f, &run, at("out"));
    assert_int_equal(run.iteration, 7);
    assert_int_equal(unlink(at("out/iter_0000007/checksums.json")), 0);
    load(&f, &run, at("out"));
    assert_int_equal(run.iteration, 6);
    assert_int_equal(unlink(at("out/iter_0000006/checksums.json")), 0);
    assert_int_equal(unlink(at("out/iter_0000006/trainer.json")), 0);
    load(&f, &run, at("out"));
    assert_int_equal(run.iteration, 5);
    assert_int_equal(unlink(at("out/iter_0000005/trainer.json")), 0);
    assert_load_fails(&f, at("out"), "iter_0000005: damaged: it has no config.json or no trainer.json; no checkpoint");
    close_family(&f);
}

/* A save folder has one holder, whose lock ends with its process. */
static void a_second_run_in_a_folder_is_refused_and_names_the_first(void **state) {
    (void)state;
    mt_error error;
    int ready[2], done[2];
    char words[80], byte = 0;
    mt_run_options options = {.save = (char *)at("out")};
    assert_int_equal(pipe(ready) | pipe(done), 0);
    pid_t holder = fork();
    if (holder == 0) {
        byte = mt_checkpoint_claim(&options, &mt_grid_of_one.world, &error) == 0;
        if (write(ready[1], &byte, 1) == 1) (void)!read(done[0], &byte, 1);
        _exit(0);
    }
    assert_true(read(ready[0], &byte, 1) == 1 && byte == 1);
    snprintf(words, sizeof words, "is in use by another run, process %d on host ", (int)holder);
    assert_int_equal(mt_checkpoint_claim(&options, &mt_grid_of_one.world, &error), -1);
    assert_says(&error, words);
    kill(holder, SIGKILL);
    assert_int_equal(waitpid(holder, NULL, 0), holder);
    assert_int_equal(mt_checkpoint_claim(&options, &mt_grid_of_one.world, &error), 0);
    for (int i = 0; i < 2; i++) close(ready[i]), close(done[i]);
}

static void checkpoints_of_another_run_are_not_saved_over(void **state) {
    (void)state;
    mt_error error;
    fixture f = open_family("llama", 4, 1, false);
    create_model(&f, &mt_grid_of_one);
    mt_run_state run = {.iteration = 5};
    save(&f, &run, at("out"));
    mt_run_options options = {.save = (char *)at("out")};
    assert_int_equal(mt_checkpoint_claim(&options, &mt_grid_of_one.world, &error), -1);
    assert_says(&error, "holds checkpoints of another run, up to iteration 5; continue that run by --load");
    char *const loads[] = {(char *)at("out"), (char *)at("out/"), (char *)at("out/iter_0000005")};
    for (int i = 0; i < 3; i++) {
        options.load = loads[i];
        assert_int_equal(mt_checkpoint_claim(&options, &mt_grid_of_one.world, &error), 0);
    }
    options = (mt_run_options){.save = (char *)at("out"), .auto_resume = true}; // began anew: the folder was empty then
    assert_int_equal(mt_checkpoint_claim(&options, &mt_grid_of_one.world, &error), -1);
    assert_says(&error, "another run has saved there since");
    options.load = (char *)at("out");
    assert_int_equal(mt_checkpoint_claim(&options, &mt_grid_of_one.world, &error), 0);
    options = (mt_run_options){.save = (char *)at("out"), .overwrite = true};
    assert_int_equal(mt_checkpoint_claim(&options, &mt_grid_of_one.world, &error), 0);
    f.options.overwrite = true; // the other run's checkpoints go with the first save
    run.iteration = 2;
    save(&f, &run, at("out"));
    assert_int_equal(count_entries(at("out"), "iter_"), 1);
    load(&f, &run, at("out"));
    assert_int_equal(run.iteration, 2);
    close_family(&f);
}

static void the_average_of_the_loss_is_part_of_a_checkpoint(void **state) {
    (void)state;
    fixture f = open_family("llama", 4, 1, false), again = open_family("llama", 4, 1, false);
    create_model(&f, &mt_grid_of_one);
    create_model(&again, &mt_grid_of_one);
    mt_run_state run = {.iteration = 5};
    mt_loss_average saved = {2.0 / 3, 41}, loaded;
    mt_train_set_loss_average(f.model, &saved);
    save(&f, &run, at("out"));
    load(&again, &run, at("out"));
    loaded = mt_train_loss_average(again.model);
    assert_true(loaded.mean == saved.mean && loaded.steps == 41);
    again.options.finetune = true; // another run
    load(&again, &run, at("out"));
    loaded = mt_train_loss_average(again.model);
    assert_true(loaded.mean == 0 && loaded.steps == 0);
    close_family(&f);
    close_family(&again);
}

/* ---- delayed scaling of fp8 */

#define DELAYED " --fp8-format hybrid --fp8-amax-compute-algo max --fp8-amax-history-len "

static fixture open_fp8(const char *family, bool bf16, const char *words) {
    more_options = words;
    fixture f = open_family(family, 4, 1, bf16);
    more_options = "";
    create_model(&f, &mt_grid_of_one);
    return f;
}

static void assert_same_scales(fixture *a, fixture *b) {
    mt_fp8_state x = mt_train_fp8_state(a->model), y = mt_train_fp8_state(b->model);
    int64_t n = x.num_linears * MT_NUM_FP8_OPERANDS;
    assert_int_equal(x.num_linears, y.num_linears);
    assert_true(n > 0);
    assert_memory_equal(x.scale, y.scale, (size_t)n * 4);
    assert_memory_equal(x.history, y.history, (size_t)(n * x.history_length) * 4);
    mt_fp8_state_free(&x);
    mt_fp8_state_free(&y);
}

/* Loads; the lines on standard error must have `words`, or be none (NULL). */
static void load_says(fixture *f, mt_run_state *run, const char *folder, const char *words) {
    char text[1024] = {0};
    fflush(stderr);
    int before = dup(2);
    assert_non_null(freopen(at("stderr"), "w", stderr));
    load(f, run, folder);
    fflush(stderr);
    dup2(before, 2);
    close(before);
    FILE *file = fopen(at("stderr"), "r");
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    if (words ? !strstr(text, words) || strchr(text, '\n') != text + length - 1 : length > 0)
        fail_msg("\"%s\" is not one line with \"%s\"", text, words ? words : "");
}

static void the_scales_of_fp8_continue_bit_for_bit(void **state) {
    (void)state;
    static const char *const of[] = {"llama", "gpt2", "mixtral", "deepseek_v3"};
    for (int k = 0; k < 8; k++) {
        const char *words = k % 3 == 0 ? DELAYED "1" : DELAYED "4";
        fixture f = open_fp8(of[k / 2], k % 2, words), again = open_fp8(of[k / 2], k % 2, words);
        mt_run_state run = {0}, resumed = {0};
        double loss;
        mt_error error;
        train_steps(&f, &run, 0, 3);
        source from = {&f, 7, SEQUENCES, 0, SEQUENCES};
        assert_int_equal(mt_evaluate(f.model, 1, next_micro_batch, &from, &f.batch, &loss, &error), 0);
        save(&f, &run, at("out"));
        load_says(&again, &resumed, at("out"), NULL);
        assert_same_scales(&f, &again);
        train_steps(&f, &run, 3, 3);
        train_steps(&again, &resumed, 3, 3);
        assert_same_model(&f, &again);
        assert_same_scales(&f, &again);
        load_says(&f, &run, at("out/iter_0000003"), NULL); // back, as after a bad step
        train_steps(&f, &run, 3, 3);
        assert_same_model(&f, &again);
        assert_same_scales(&f, &again);
        assert_false(exists(at("out/fp8.safetensors"))); // no link for other loaders
        close_family(&f);
        close_family(&again);
    }
}

/* Entry `age` steps back of operand k of linear i; NAN: the history is shorter. */
static float amax_at(const mt_fp8_state *s, int64_t age, int64_t i, int64_t k) {
    if (age >= s->history_length) return NAN;
    return s->history[((s->history_length - age) * s->num_linears + i) * MT_NUM_FP8_OPERANDS + k];
}

static void another_history_or_recipe_says_what_happens(void **state) {
    (void)state;
    static const struct {
        const char *words, *says;
        bool keeps; // scales and the newest entries
    } cases[] = {
        {DELAYED "4", NULL, true},
        {DELAYED "2", "the run's --fp8-amax-history-len was 4; now, with 2, the histories are cut to the newest", true},
        {DELAYED "9", "the run's --fp8-amax-history-len was 4; now, with 9, the histories are longer", true},
        {"--fp8-format hybrid --fp8-recipe tensorwise", "its fp8 scales are left aside", false},
        {"", "its fp8 scales are left aside", false},
        {"--finetune" DELAYED "4", NULL, false},
        {"--no-load-optim" DELAYED "4", NULL, true},
    };
    fixture f = open_fp8("llama", false, DELAYED "4");
    mt_run_state run = {0};
    train_steps(&f, &run, 0, 5);
    save(&f, &run, at("out"));
    mt_fp8_state saved = mt_train_fp8_state(f.model);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        fixture again = open_fp8("llama", false, cases[c].words);
        load_says(&again, &run, at("out"), cases[c].says);
        mt_fp8_state loaded = mt_train_fp8_state(again.model);
        for (int64_t i = 0; i < loaded.num_linears; i++)
            for (int64_t k = 0; k < MT_NUM_FP8_OPERANDS; k++) {
                assert_true(loaded.scale[i * 3 + k] == (cases[c].keeps ? saved.scale[i * 3 + k] : 1));
                for (int64_t age = 1; age < loaded.history_length; age++) {
                    float amax = amax_at(&saved, age, i, k);
                    assert_true(amax_at(&loaded, age, i, k) == (cases[c].keeps && amax == amax ? amax : 0));
                    assert_true(amax != amax || amax > 0); // five steps filled the history
                }
            }
        mt_fp8_state_free(&loaded);
        close_family(&again);
    }
    mt_fp8_state_free(&saved);
    close_family(&f);
}

/* Scales of e5m2 become those of e4m3: the largest number is 128 times smaller. */
static void scales_follow_the_format(void **state) {
    (void)state;
    fixture f = open_fp8("llama", false, DELAYED "4");
    fixture again = open_fp8("llama", false, "--fp8-format e4m3 --fp8-amax-history-len 4");
    mt_run_state run = {0};
    train_steps(&f, &run, 0, 2);
    save(&f, &run, at("out"));
    load_says(&again, &run, at("out"), NULL);
    mt_fp8_state saved = mt_train_fp8_state(f.model), loaded = mt_train_fp8_state(again.model);
    for (int64_t i = 0; i < saved.num_linears * MT_NUM_FP8_OPERANDS; i++)
        assert_true(loaded.scale[i] == (i % 3 == MT_FP8_DY ? saved.scale[i] / 128 : saved.scale[i]));
    mt_fp8_state_free(&saved);
    mt_fp8_state_free(&loaded);
    close_family(&f);
    close_family(&again);
}

static void a_checkpoint_without_scales_begins_with_fresh_ones(void **state) {
    (void)state;
    fixture plain = open_fp8("llama", false, ""), f = open_fp8("llama", false, DELAYED "4");
    fixture some = open_fp8("llama", false, DELAYED "4 --first-last-layers-bf16");
    mt_run_state run = {0};
    train_steps(&plain, &run, 0, 1);
    save(&plain, &run, at("plain"));
    train_steps(&f, &run, 1, 1);
    load_says(&f, &run, at("plain"), "has no fp8 scales; those of --fp8-recipe delayed begin at 1");
    mt_fp8_state fresh = mt_train_fp8_state(f.model);
    for (int64_t i = 0; i < fresh.num_linears * MT_NUM_FP8_OPERANDS; i++) assert_true(fresh.scale[i] == 1);
    mt_fp8_state_free(&fresh);
    train_steps(&some, &run, 1, 1);
    save(&some, &run, at("some"));
    load_says(&f, &run, at("some"), "lacks linears that are in fp8 now; their scales begin at 1");
    close_family(&plain);
    close_family(&some);
    close_family(&f);
}

/* Edits the header of a file of tensors; the new text has the length of the old one. */
static void edit_header(const char *path, const char *expression) {
    char command[1024];
    snprintf(command, sizeof command, "LC_ALL=C sed -i '%s' %s", expression, path);
    assert_int_equal(system(command), 0);
}

/* A byte of the file that differs is found by the checksums, or without these by its value, name or shape. */
static void damaged_scales_are_refused(void **state) {
    (void)state;
    fixture f = open_fp8("llama", false, DELAYED "4");
    mt_run_state run = {0};
    train_steps(&f, &run, 0, 2);
    save(&f, &run, at("out"));
    const char *path = at("out/iter_0000002/fp8.safetensors");
    mt_safetensors *set;
    mt_error error;
    assert_int_equal(mt_safetensors_open(&set, path, &error), 0);
    const mt_tensor_info *scale = mt_safetensors_find(set, "layers.2.down.scale");
    assert_non_null(scale);
    assert_int_equal(scale->num_dims, 2);
    int64_t place = (const unsigned char *)scale->data - mt_safetensors_get_file(set, 0)->base;
    mt_safetensors_close(set);
    FILE *file = fopen(path, "r+b");
    const float negative = -2;
    assert_non_null(file);
    assert_int_equal(fseek(file, (long)place, SEEK_SET), 0);
    assert_int_equal(fwrite(&negative, 4, 1, file), 1);
    fclose(file);
    assert_load_fails(&f, at("out/iter_0000002"), "fp8.safetensors: damaged");
    make_older(at("out/iter_0000002"));
    assert_load_fails(&f, at("out/iter_0000002"), "tensor \"layers.2.down.scale\" has the value -2");
    edit_header(at("out/iter_0000002/fp8.safetensors"), "s/layers.1.down.scale/layers.1.down.SCALE/");
    assert_load_fails(&f, at("out/iter_0000002"), "tensor \"layers.1.down.amax_history\" is without its scale");
    edit_header(at("out/iter_0000002/fp8.safetensors"), "s/\\(layers.0.down.amax_history\"[^[]*\\)\\[1,4,/\\1[4,1,/");
    assert_load_fails(&f, at("out/iter_0000002"), "\"layers.0.down.amax_history\" has 4 ranks and its scale 1");
    close_family(&f);
}

static void an_optimizer_without_a_tensor_is_refused(void **state) {
    (void)state;
    fixture f = open_family("llama", 4, 1, false), tied = open_family("llama3_rope_tied", 4, 1, false);
    mt_error error;
    mt_run_state run = {.iteration = 5};
    create_model(&f, &mt_grid_of_one);
    create_model(&tied, &mt_grid_of_one);
    save(&f, &run, at("out"));
    unlink(at("out/iter_0000005/optimizer.safetensors"));
    assert_load_fails(&f, at("out"), "damaged: optimizer.safetensors was saved, but is not there");
    make_older(at("out/iter_0000005"));
    assert_load_fails(&f, at("out"), "optimizer.safetensors");
    unlink(at("out/iter_0000005/optimizer.safetensors.index.json"));
    assert_int_equal(
        mt_safetensors_save_folder(tied.model, at("out/iter_0000005"), "optimizer", 1 << 30, "--save", NULL, &error),
        0);
    assert_load_fails(&f, at("out"), "the optimizer's state has no tensor \"exp_avg.lm_head.weight\"");
    close_family(&f);
    close_family(&tied);
}

/* Truncates every file of a checkpoint, at every length of its first bytes and at some later ones: an error, never a
 * crash. */
static void a_cut_checkpoint_never_loads(void **state) {
    (void)state;
    static const char *const names[] = {"config.json", "model.safetensors", "optimizer.safetensors", "trainer.json"};
    fixture f = open_family("llama", 4, 1, false);
    create_model(&f, &mt_grid_of_one);
    mt_run_state run = {.iteration = 1};
    save(&f, &run, at("out"));
    for (int k = 1; k < 4; k++) {
        char path[512];
        snprintf(path, sizeof path, "%s/out/iter_0000001/%s", root, names[k]);
        struct stat status;
        assert_int_equal(stat(path, &status), 0);
        char *whole = read_file(at("out/iter_0000001"), names[k], status.st_size);
        int64_t last = k == 3 ? status.st_size - 2
                              : status.st_size; // trainer.json ends in } and a newline: without the newline it is whole
        for (int64_t cut = 0; cut < last; cut += cut < 100 ? 1 : 997) {
            assert_int_equal(truncate(path, cut), 0);
            assert_load_fails(&f, at("out"), names[k]);
            FILE *file = fopen(path, "wb");
            assert_int_equal(fwrite(whole, 1, (size_t)status.st_size, file), status.st_size);
            fclose(file);
        }
        load(&f, &run, at("out"));
        free(whole);
    }
    close_family(&f);
}

/* The sum of RFC 3720; parts that are added in any order give the same sum. */
static void sums_are_crc32c(void **state) {
    (void)state;
    unsigned char data[100000];
    memset(data, 0, 32);
    assert_int_equal(mt_crc32c(data, 32), 0x8a9136aa);
    memset(data, 0xff, 32);
    assert_int_equal(mt_crc32c(data, 32), 0x62a8ab43);
    for (int i = 0; i < 32; i++) data[i] = (unsigned char)i;
    assert_int_equal(mt_crc32c(data, 32), 0x46dd794e);
    assert_int_equal(mt_crc32c("123456789", 9), 0xe3069283);
    for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)(i * 31 + (i >> 8));
    uint32_t state_by_bit = ~0u; // bit by bit, the definition
    for (size_t i = 0; i < sizeof data * 8; i++) {
        uint32_t bit = (state_by_bit ^ (uint32_t)(data[i / 8] >> i % 8)) & 1;
        state_by_bit = (state_by_bit >> 1) ^ (bit ? 0x82f63b78 : 0);
    }
    assert_int_equal(mt_crc32c(data, sizeof data), ~state_by_bit);
}

/* Changes one byte of a file of the last checkpoint, or truncates the file there. */
static void damage(const char *path, int64_t place, bool cuts) {
    if (cuts) {
        assert_int_equal(truncate(path, place), 0);
        return;
    }
    FILE *file = fopen(path, "r+b");
    assert_non_null(file);
    assert_int_equal(fseek(file, (long)place, SEEK_SET), 0);
    int byte = fgetc(file);
    assert_int_equal(fseek(file, (long)place, SEEK_SET), 0);
    fputc(byte ^ (1 << place % 8), file);
    assert_int_equal(fclose(file), 0);
}

/* A truncated or changed checkpoint is never loaded; a run that resumes from its own folder continues from the
 * checkpoint before. */
static void damage_anywhere_is_seen_and_the_one_before_is_used(void **state) {
    (void)state;
    static const char *const names[] = {"model.safetensors",
                                        "optimizer.safetensors",
                                        "trainer.json",
                                        "config.json",
                                        "checksums.json",
                                        "model.safetensors.index.json",
                                        "optimizer.safetensors.index.json"};
#ifdef __SANITIZE_ADDRESS__
    enum { PLACES = 3 }; // fewer, because loading is slow
#else
    enum { PLACES = 24 };
#endif
    fixture f = open_family("llama", 4, 1, false), before = open_family("llama", 4, 1, false);
    mt_run_state run = {.iteration = 1};
    create_model(&f, &mt_grid_of_one);
    create_model(&before, &mt_grid_of_one);
    mt_model_init(before.model);
    fill_state(&before);
    save(&before, &run, at("out"));
    run.iteration = 2;
    save(&f, &run, at("out"));
    char folder[512], command[2048], path[1024];
    snprintf(folder, sizeof folder, "%s", at("out"));
    snprintf(command, sizeof command, "cp -a %s/iter_0000002 %s", folder, at("whole"));
    assert_int_equal(system(command), 0);
    free(f.options.load); // not the folder of the other models
    for (int k = 0; k < (int)(sizeof names / sizeof *names); k++) {
        struct stat status;
        snprintf(path, sizeof path, "%s/iter_0000002/%s", folder, names[k]);
        assert_int_equal(stat(path, &status), 0);
        for (int i = 0; i < 2 * PLACES; i++) {
            mt_error error;
            int64_t place = (status.st_size - 1) * (i / 2) / (PLACES - 1);
            damage(path, place, i % 2);
            f.options.load = NULL, f.options.save = NULL;
            if (mt_checkpoint_load(f.model, &f.options, &run, folder, &error) == 0)
                fail_msg("%s, %s at %d: loaded", names[k], i % 2 ? "cut" : "changed", (int)place);
            assert_says(&error, "damaged");
            f.options.load = f.options.save = folder;
            spoil(&f);
            int standard_error = dup(2), nowhere = open("/dev/null", O_WRONLY); // a warning each time
            dup2(nowhere, 2);
            load(&f, &run, folder);
            dup2(standard_error, 2);
            close(standard_error), close(nowhere);
            assert_int_equal(run.iteration, 1);
            assert_same_model(&f, &before);
            snprintf(command, sizeof command, "cp %s/%s %s", at("whole"), names[k], path);
            assert_int_equal(system(command), 0);
        }
    }
    load(&f, &run, folder);
    assert_int_equal(run.iteration, 2);
    f.options.load = f.options.save = NULL;
    close_family(&f);
    close_family(&before);
}

int main(void) {
#define ROOT_TEST(test) cmocka_unit_test_setup_teardown(test, make_root, remove_root)
    const struct CMUnitTest tests[] = {
        ROOT_TEST(every_family_comes_out_as_it_went_in),
        ROOT_TEST(small_shards_hold_the_same_tensors),
        ROOT_TEST(every_stored_type_loads_exactly),
        ROOT_TEST(stacked_experts_load_and_are_saved_apart),
        ROOT_TEST(the_text_model_beside_a_vision_tower_is_read),
        ROOT_TEST(released_names_of_dense_layers_are_read),
        ROOT_TEST(rows_that_pad_the_vocabulary_become_zero),
        ROOT_TEST(names_without_their_prefix_and_old_masks_load),
        ROOT_TEST(a_tied_folder_has_one_embedding),
        ROOT_TEST(weights_that_do_not_fit_are_refused_by_name),
        ROOT_TEST(values_that_are_not_finite_are_reported),
        ROOT_TEST(the_folder_itself_becomes_a_hugging_face_folder),
        ROOT_TEST(the_latest_moves_on_and_links_that_are_stale_go),
        ROOT_TEST(saving_an_iteration_again_replaces_it_whole),
        ROOT_TEST(what_a_killed_run_left_is_removed_and_nothing_else),
        ROOT_TEST(someone_elses_model_is_not_overwritten),
        ROOT_TEST(a_full_disk_leaves_the_checkpoint_before),
        ROOT_TEST(a_failing_addition_leaves_the_checkpoint_before),
        ROOT_TEST(moments_masters_and_the_place_in_the_run_return_bit_for_bit),
        ROOT_TEST(a_resumed_run_continues_bit_for_bit),
        ROOT_TEST(options_say_what_a_run_takes_over),
        ROOT_TEST(a_run_may_change_its_precision),
        ROOT_TEST(a_damaged_checkpoint_is_named_with_the_remedy),
        ROOT_TEST(a_file_from_elsewhere_is_refused),
        ROOT_TEST(without_the_tracker_the_newest_whole_checkpoint_is_loaded),
        ROOT_TEST(a_second_run_in_a_folder_is_refused_and_names_the_first),
        ROOT_TEST(checkpoints_of_another_run_are_not_saved_over),
        ROOT_TEST(the_average_of_the_loss_is_part_of_a_checkpoint),
        ROOT_TEST(the_scales_of_fp8_continue_bit_for_bit),
        ROOT_TEST(another_history_or_recipe_says_what_happens),
        ROOT_TEST(scales_follow_the_format),
        ROOT_TEST(a_checkpoint_without_scales_begins_with_fresh_ones),
        ROOT_TEST(damaged_scales_are_refused),
        ROOT_TEST(an_optimizer_without_a_tensor_is_refused),
        ROOT_TEST(a_cut_checkpoint_never_loads),
        cmocka_unit_test(sums_are_crc32c),
        ROOT_TEST(damage_anywhere_is_seen_and_the_one_before_is_used),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
