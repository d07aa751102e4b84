/* test_fp8_folder.c: Hugging Face folders with weights in fp8 and a scale per block, as DeepSeek-V3's, or with experts
 * in MXFP4, as gpt-oss's, load to the values that the same folder without quantization has; bad scales are refused by
 * name. */
#include "../data/base/safetensors.h"
#include "../data/checkpoint/checkpoint_load.h"
#include "../data/checkpoint/hf_folder.h"
#include "../data/checkpoint/run_options.h"
#include "../data/options/option_table.h"
#include "families.h"
#include "folder.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

typedef struct matrix {
    char name[128];
    int64_t shape[4], num_dims;
    float *values;
} matrix;

typedef struct tensors {
    matrix list[512];
    int count;
} tensors;

static tensors all;

static int64_t num_values(const matrix *m) {
    int64_t count = 1;
    for (int64_t i = 0; i < m->num_dims; i++) count *= m->shape[i];
    return count;
}

static void tensors_free(void) {
    for (int i = 0; i < all.count; i++) free(all.list[i].values);
    all.count = 0;
}

static void read_family(const char *family) {
    mt_safetensors *set;
    mt_error error;
    char path[256];
    tensors_free();
    snprintf(path, sizeof path, "tests/golden/hf/%s", family);
    if (mt_safetensors_open_folder(&set, path, "model", &error) != 0) fail_msg("%s", error.text);
    for (int64_t i = 0; i < mt_safetensors_count(set); i++) {
        const mt_tensor_info *tensor = mt_safetensors_get(set, i);
        matrix *m = &all.list[all.count++];
        assert_in_range(all.count, 1, 512);
        snprintf(m->name, sizeof m->name, "%s", tensor->name);
        m->num_dims = tensor->num_dims;
        memcpy(m->shape, tensor->shape, sizeof m->shape);
        m->values = mt_malloc(tensor->bytes);
        memcpy(m->values, tensor->data, (size_t)tensor->bytes);
    }
    mt_safetensors_close(set);
}

/* Tensors of drawn values. */
static void make_tensors(const matrix *rows, int count) {
    uint32_t random = 1;
    tensors_free();
    for (; all.count < count; all.count++) {
        matrix *m = &all.list[all.count];
        *m = rows[all.count];
        m->values = mt_malloc(num_values(m) * 4);
        for (int64_t i = 0; i < num_values(m); i++)
            m->values[i] = (float)((random = random * 1664525 + 1013904223) >> 8) * 0x1p-24f - 0.5f;
    }
}

/* One layer whose matrices are larger than the reader's segments and buffers. */
static void make_large(void) {
    static const matrix rows[] = {
        {"lm_head.weight", {64, 256}, 2, NULL},
        {"model.embed_tokens.weight", {64, 256}, 2, NULL},
        {"model.layers.0.input_layernorm.weight", {256}, 1, NULL},
        {"model.layers.0.mlp.down_proj.weight", {256, 9001}, 2, NULL},
        {"model.layers.0.mlp.gate_proj.weight", {9001, 256}, 2, NULL},
        {"model.layers.0.mlp.up_proj.weight", {9001, 256}, 2, NULL},
        {"model.layers.0.post_attention_layernorm.weight", {256}, 1, NULL},
        {"model.layers.0.self_attn.k_proj.weight", {256, 256}, 2, NULL},
        {"model.layers.0.self_attn.o_proj.weight", {256, 256}, 2, NULL},
        {"model.layers.0.self_attn.q_proj.weight", {256, 256}, 2, NULL},
        {"model.layers.0.self_attn.v_proj.weight", {256, 256}, 2, NULL},
        {"model.norm.weight", {256}, 1, NULL},
    };
    make_tensors(rows, sizeof rows / sizeof *rows);
}

/* The same of a gpt-oss with two experts. */
static void make_large_experts(void) {
    static const matrix rows[] = {
        {"lm_head.weight", {64, 256}, 2, NULL},
        {"model.embed_tokens.weight", {64, 256}, 2, NULL},
        {"model.layers.0.input_layernorm.weight", {256}, 1, NULL},
        {"model.layers.0.mlp.experts.down_proj", {2, 3008, 256}, 3, NULL},
        {"model.layers.0.mlp.experts.down_proj_bias", {2, 256}, 2, NULL},
        {"model.layers.0.mlp.experts.gate_up_proj", {2, 256, 6016}, 3, NULL},
        {"model.layers.0.mlp.experts.gate_up_proj_bias", {2, 6016}, 2, NULL},
        {"model.layers.0.mlp.router.bias", {2}, 1, NULL},
        {"model.layers.0.mlp.router.weight", {2, 256}, 2, NULL},
        {"model.layers.0.post_attention_layernorm.weight", {256}, 1, NULL},
        {"model.layers.0.self_attn.k_proj.weight", {256, 256}, 2, NULL},
        {"model.layers.0.self_attn.o_proj.weight", {256, 256}, 2, NULL},
        {"model.layers.0.self_attn.q_proj.weight", {256, 256}, 2, NULL},
        {"model.layers.0.self_attn.sinks", {4}, 1, NULL},
        {"model.layers.0.self_attn.v_proj.weight", {256, 256}, 2, NULL},
        {"model.norm.weight", {256}, 1, NULL},
    };
    make_tensors(rows, sizeof rows / sizeof *rows);
}

static const char large_config[] =
    "{\"model_type\": \"llama\", \"vocab_size\": 64, \"hidden_size\": 256, \"intermediate_size\": 9001, "
    "\"num_hidden_layers\": 1, \"num_attention_heads\": 4, \"num_key_value_heads\": 4, \"hidden_act\": \"silu\", "
    "\"max_position_embeddings\": 64, \"rms_norm_eps\": 1e-5, \"rope_theta\": 1e4, \"tie_word_embeddings\": false, "
    "\"attention_bias\": false, \"mlp_bias\": false, \"initializer_range\": 0.02}";

/* A model without biases of attention; other keys have the defaults of transformers. */
static const char large_experts_config[] =
    "{\"model_type\": \"gpt_oss\", \"vocab_size\": 64, \"hidden_size\": 256, \"intermediate_size\": 3008, "
    "\"num_hidden_layers\": 1, \"num_attention_heads\": 4, \"num_key_value_heads\": 4, "
    "\"attention_bias\": false, \"head_dim\": 64, \"num_local_experts\": 2, \"num_experts_per_tok\": 2}";

/* Embeddings, the output layer, routers, norms, biases and stacked experts stay as they are. */
static bool is_quantized(const matrix *m) {
    return m->num_dims == 2 && !strstr(m->name, "_bias") && (strstr(m->name, "_proj") || strstr(m->name, ".c_"));
}

/* ---- folders */

typedef enum fault {
    NONE,
    SCALES_MISSING,
    SCALE_ZERO,
    SCALE_NEGATIVE,
    SCALE_NAN,
    SCALE_INFINITE,
    SCALES_SHAPE,
    SCALES_DTYPE,
    SCALES_EXTRA,  // of a tensor that is not in fp8
    CONFIG_PLAIN,  // no quantization_config
    VECTOR_IN_FP8, // a norm
    E5M2,
    BLOCKS_SHAPE, // of MXFP4
    BLOCKS_CUT
} fault;

static struct {
    char header[1 << 17], data[1 << 25];
    int64_t used, bytes;
} file;

static void add_shaped(const char *name, const char *dtype, int64_t num_dims, const int64_t *shape, int64_t bytes) {
    file.used += sprintf(file.header + file.used, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%d", file.used ? "," : "{",
                         name, dtype, (int)shape[0]);
    for (int64_t i = 1; i < num_dims; i++) file.used += sprintf(file.header + file.used, ",%d", (int)shape[i]);
    file.used +=
        sprintf(file.header + file.used, "],\"data_offsets\":[%d,%d]}", (int)file.bytes, (int)(file.bytes + bytes));
    file.bytes += bytes;
}

static void add_tensor(const char *name, const char *dtype, int64_t num_dims, int64_t rows, int64_t cols,
                       int64_t bytes) {
    add_shaped(name, dtype, num_dims, (const int64_t[]){rows, cols}, bytes);
}

/* Value of a code of e4m3: sign, 4 bits of exponent with bias 7, 3 bits of mantissa. */
static float decode(uint8_t code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    double value = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return (float)(code & 0x80 ? -value : value);
}

static float scale_rounded(float scale, mt_dtype dtype) {
    return dtype == MT_BF16 ? mt_bf16_to_f32(mt_f32_to_bf16(scale)) : scale;
}

/* Quantizes m in place, with scales[ceil(rows / a), ceil(cols / b)], and appends codes and scales to the file. */
static void add_quantized(matrix *m, const int64_t block[2], mt_dtype dtype, fault how) {
    int64_t R = m->shape[0], C = m->shape[1], rows = (R + block[0] - 1) / block[0],
            cols = (C + block[1] - 1) / block[1];
    float *scales = mt_calloc(rows * cols * 4);
    char name[192];
    for (int64_t i = 0; i < R * C; i++) {
        float *amax = &scales[i / C / block[0] * cols + i % C / block[1]];
        *amax = fmaxf(*amax, fabsf(m->values[i]));
    }
    for (int64_t i = 0; i < rows * cols; i++) scales[i] = scale_rounded(scales[i] > 0 ? scales[i] / 448 : 1, dtype);
    for (int64_t i = 0; i < R * C; i++) {
        float scale = scales[i / C / block[0] * cols + i % C / block[1]];
        uint8_t code = mt_f32_to_f8(m->values[i] / scale, MT_F8_E4M3);
        m->values[i] = decode(code) * scale;
        file.data[file.bytes + i] = (char)code;
    }
    add_tensor(m->name, how == E5M2 ? "F8_E5M2" : "F8_E4M3", 2, R, C, R * C);
    snprintf(name, sizeof name, "%s_scale_inv", m->name);
    if (how >= SCALE_ZERO && how <= SCALE_INFINITE)
        scales[rows * cols - 1] = (const float[]){0, -1, NAN, INFINITY}[how - SCALE_ZERO];
    int64_t size = how == SCALES_DTYPE ? 8 : mt_dtype_size(dtype);
    for (int64_t i = 0; i < rows * cols; i++) {
        double wide = scales[i];
        uint16_t half = mt_f32_to_bf16(scales[i]);
        const void *from = size == 8 ? (void *)&wide : size == 4 ? (void *)&scales[i] : &half;
        memcpy(file.data + file.bytes + i * size, from, (size_t)size);
    }
    if (how != SCALES_MISSING)
        add_tensor(name, size == 8 ? "F64" : mt_dtype_name(dtype), 2, how == SCALES_SHAPE ? rows * cols : rows,
                   how == SCALES_SHAPE ? 1 : cols, rows * cols * size);
    free(scales);
}

/* Quantizes stacked matrices [experts, in, out] in place and appends their blocks [experts, out, in / 32, 16] and
 * scales to the file. */
static void add_mxfp4(matrix *m, fault how) {
    static const float grid[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    enum { BLOCK = 32, HALF = BLOCK / 2 };
    int64_t in = m->shape[1], out = m->shape[2], blocks = m->shape[0] * out * in / BLOCK;
    unsigned char *codes = (unsigned char *)file.data + file.bytes, *scales = codes + blocks * HALF;
    int64_t shape[] = {m->shape[0], out, in / BLOCK, HALF};
    char name[192];
    memset(codes, 0, (size_t)blocks * HALF);
    for (int64_t b = 0; b < blocks; b++) {
        int64_t row = b / shape[2], first = b % shape[2] * BLOCK; // output row % out of expert row / out
        float *values = m->values + row / out * in * out + row % out + first * out, amax = 0;
        for (int64_t i = 0; i < BLOCK; i++) amax = fmaxf(amax, fabsf(values[i * out]));
        int exponent = amax > 0 ? ilogbf(amax) - 2 : 0;
        scales[b] = (unsigned char)(exponent + 127);
        for (int64_t i = 0; i < BLOCK; i++) {
            float value = ldexpf(values[i * out], -exponent);
            int code = 0;
            for (int k = 1; k < 8; k++)
                if (fabsf(fabsf(value) - grid[k]) < fabsf(fabsf(value) - grid[code])) code = k;
            values[i * out] = ldexpf(value < 0 ? -grid[code] : grid[code], exponent);
            codes[b * HALF + i / 2] |= (unsigned char)((code | (value < 0 ? 8 : 0)) << (i % 2 ? 4 : 0));
        }
    }
    snprintf(name, sizeof name, "%s_blocks", m->name);
    if (how == BLOCKS_SHAPE) shape[0] *= 2, shape[1] /= 2;
    add_shaped(name, "U8", 4, shape, blocks * HALF);
    snprintf(name, sizeof name, "%s_scales", m->name);
    if (how != BLOCKS_CUT) add_shaped(name, "U8", 3, shape, blocks);
}

static void write_file(const char *path, const char *begin, int64_t bytes, const char *end) {
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    if (end == file.data) assert_int_equal(fwrite(&bytes, 8, 1, out), 1);
    assert_int_equal(fwrite(begin, 1, (size_t)bytes, out), bytes);
    if (end == file.data) assert_int_equal(fwrite(end, 1, (size_t)file.bytes, out), file.bytes);
    assert_int_equal(fclose(out), 0);
}

/* A block of these rows: experts in MXFP4. */
enum { MXFP4 = -1 };

/* Writes the tensors to the folder root/NAME, quantized in blocks or, with block NULL, as they are. The tensor of
 * `faulty` has the fault. */
static void write_folder(const char *name, const char *config, const int64_t *block, mt_dtype scale_dtype, fault how,
                         const char *faulty) {
    char path[600], text[1 << 14];
    assert_int_equal(mkdir(at(name), 0777), 0);
    file.used = file.bytes = 0;
    for (int i = 0; i < all.count; i++) {
        matrix *m = &all.list[i];
        bool is_faulty = faulty && strcmp(m->name, faulty) == 0;
        if (block && *block == MXFP4 && m->num_dims == 3) {
            add_mxfp4(m, is_faulty ? how : NONE);
            continue;
        }
        if (block && *block != MXFP4 && is_quantized(m)) {
            add_quantized(m, block, scale_dtype, is_faulty ? how : NONE);
            continue;
        }
        bool in_fp8 = is_faulty && how == VECTOR_IN_FP8;
        memcpy(file.data + file.bytes, m->values, (size_t)num_values(m) * 4);
        add_shaped(m->name, in_fp8 ? "F8_E4M3" : "F32", m->num_dims, m->shape, num_values(m) * (in_fp8 ? 1 : 4));
        if (is_faulty && how == SCALES_EXTRA) {
            memset(file.data + file.bytes, 0, 4);
            snprintf(path, sizeof path, "%s_scale_inv", m->name);
            add_tensor(path, "F32", 2, 1, 1, 4);
        }
    }
    file.header[file.used++] = '}';
    snprintf(path, sizeof path, "%s/model.safetensors", at(name));
    write_file(path, file.header, file.used, file.data);
    int length = snprintf(text, sizeof text, "%s", config);
    while (length > 0 && text[length - 1] != '}') length--;
    if (block && *block == MXFP4)
        length = length - 1 +
                 sprintf(text + length - 1, ", \"quantization_config\": {\"quant_method\": \"mxfp4\", "
                                            "\"modules_to_not_convert\": [\"lm_head\"]}}");
    else if (block && how != CONFIG_PLAIN)
        length = length - 1 +
                 sprintf(text + length - 1,
                         ", \"quantization_config\": {\"quant_method\": \"fp8\", \"fmt\": \"e4m3\", "
                         "\"activation_scheme\": \"dynamic\", \"weight_block_size\": [%d, %d]}}",
                         (int)block[0], (int)block[1]);
    snprintf(path, sizeof path, "%s/config.json", at(name));
    write_file(path, text, length, NULL);
}

static char *family_config(const char *family) {
    char path[256], *text = mt_calloc(1 << 14);
    snprintf(path, sizeof path, "tests/golden/hf/%s/config.json", family);
    FILE *from = fopen(path, "rb");
    assert_non_null(from);
    assert_in_range(fread(text, 1, (1 << 14) - 1, from), 100, (1 << 14) - 2);
    fclose(from);
    return text;
}

/* ---- tests */

/* Two folders load to the same weights, bit for bit. */
static void assert_same_weights(const char *a, const char *b) {
    const char *const settings[] = {"device", "cpu", NULL}, *folders[] = {at(a), at(b)};
    mt_hf *hf[2];
    mt_grid grids[2] = {mt_grid_of_one, mt_grid_of_one};
    mt_error error;
    int64_t count, num_params;
    for (int i = 0; i < 2; i++)
        if (mt_hf_open(&hf[i], folders[i], settings, 1, 8, &grids[i], &error) != 0) fail_msg("%s", error.text);
    const mt_param *params = mt_model_params(hf[0]->model, &num_params);
    const mt_bucket *x = mt_model_buckets(hf[0]->model, &count), *y = mt_model_buckets(hf[1]->model, &count);
    for (int64_t i = 0; i < num_params; i++) {
        const mt_param *p = &params[i];
        const float *actual = (const float *)x[p->bucket].params + p->offset,
                    *expected = (const float *)y[p->bucket].params + p->offset;
        for (int64_t e = 0; e < p->rows_stored * p->cols; e++)
            if (actual[e] != expected[e])
                fail_msg("%s: element %lld is %.9g, expected %.9g", p->hf_name, (long long)e, actual[e], expected[e]);
    }
    mt_hf_close(hf[0]);
    mt_hf_close(hf[1]);
}

static void every_family_loads_the_product_of_codes_and_scales(void **state) {
    (void)state;
    static const int64_t blocks[][2] = {{32, 32}, {128, 128}, {24, 7}, {1, 16}};
    for (int k = 0; k < NUM_FAMILIES; k++) {
        char *config = family_config(families[k]), quantized[64], plain[64];
        snprintf(quantized, sizeof quantized, "%s_fp8", families[k]);
        snprintf(plain, sizeof plain, "%s_plain", families[k]);
        read_family(families[k]);
        write_folder(quantized, config, blocks[k % 4], k % 3 ? MT_F32 : MT_BF16, NONE, NULL);
        write_folder(plain, config, NULL, MT_F32, NONE, NULL);
        assert_same_weights(quantized, plain);
        free(config);
    }
    tensors_free();
}

static void matrices_larger_than_the_buffers_load(void **state) {
    (void)state;
    make_large();
    write_folder("quantized", large_config, (const int64_t[]){96, 200}, MT_F32, NONE, NULL);
    write_folder("plain", large_config, NULL, MT_F32, NONE, NULL);
    assert_same_weights("quantized", "plain");
    tensors_free();
}

/* The base below adapters in fp8: nothing is rounded twice. */
static void a_frozen_base_keeps_the_codes_of_a_folder(void **state) {
    (void)state;
    static const int64_t block[2] = {128, 128};
    for (int k = 0; k < 2; k++) {
        const char *name = k ? "codes_of_bf16" : "codes";
        char line[1024], *arguments[32];
        int count = 0;
        int64_t num_params, num_buckets, compared = 0;
        mt_run_options options;
        mt_run_state run = {0};
        mt_model *model = NULL;
        mt_safetensors *set = NULL;
        mt_model_plan plan = {.max_tokens = 8, .max_logits = 8, .max_position = 8, .train = true};
        mt_error error;
        make_large();
        write_folder(name, large_config, block, k ? MT_BF16 : MT_F32, NONE, NULL); // now all has the values of codes
        snprintf(line, sizeof line,
                 "train --load %s --mock-data --seq-length 8 --train-iters 1 --lr 1 --device cpu --lora-rank 1 "
                 "--lora-target all-linear --lora-base-dtype fp8",
                 at(name));
        for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
        if (mt_options_parse(&options, MT_PROGRAM_TRAIN, count, arguments, &error) != 0 ||
            mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error) != 0 ||
            mt_model_create(&model, &options.stack, &mt_grid_of_one, &mt_cpu_ops, &plan, &error) != 0 ||
            mt_checkpoint_load(model, &options, &run, at(name), &error) != 0 ||
            mt_safetensors_open_folder(&set, at(name), "model", &error) != 0)
            fail_msg("%s", error.text);
        const mt_param *params = mt_model_params(model, &num_params);
        const mt_bucket *buckets = mt_model_buckets(model, &num_buckets);
        for (const mt_param *p = params; p < params + num_params; p++) {
            if (!p->in_fp8) continue;
            const mt_tensor_info *tensor = mt_safetensors_find(set, p->hf_name);
            assert_non_null(tensor);
            assert_int_equal(tensor->bytes, p->rows * p->cols);
            if (memcmp((const char *)buckets[p->bucket].params + p->place, tensor->data, (size_t)tensor->bytes) != 0)
                fail_msg("%s has other codes", p->hf_name);
            const matrix *m = all.list;
            while (strcmp(m->name, p->hf_name) != 0) m++;
            float *values = mt_malloc(tensor->bytes * 4);
            mt_state_read(model, p, MT_STATE_WEIGHTS, 0, values, tensor->bytes);
            for (int64_t i = 0; i < tensor->bytes; i++)
                assert_true(fabsf(values[i] - m->values[i]) <= 0x1p-22f * fabsf(m->values[i]));
            free(values), compared++;
        }
        assert_int_equal(compared, 7);
        mt_safetensors_close(set);
        mt_model_destroy(model);
        mt_options_free(&options);
    }
    tensors_free();
}

static void experts_in_mxfp4_load_to_the_values_of_the_grid(void **state) {
    (void)state;
    static const int64_t block[2] = {MXFP4, MXFP4};
    char *config = family_config("gpt_oss");
    read_family("gpt_oss");
    write_folder("quantized", config, block, MT_U8, NONE, NULL);
    write_folder("plain", config, NULL, MT_F32, NONE, NULL);
    assert_same_weights("quantized", "plain");
    make_large_experts();
    write_folder("large_quantized", large_experts_config, block, MT_U8, NONE, NULL);
    write_folder("large_plain", large_experts_config, NULL, MT_F32, NONE, NULL);
    assert_same_weights("large_quantized", "large_plain");
    free(config);
    tensors_free();
}

static void blocks_of_another_shape_or_without_scales_are_refused(void **state) {
    (void)state;
    static const int64_t block[2] = {MXFP4, MXFP4};
    static const char down[] = "model.layers.1.mlp.experts.down_proj";
    static const struct {
        fault how;
        const char *words;
    } cases[] = {
        {BLOCKS_SHAPE, "\"model.layers.1.mlp.experts.down_proj_blocks\" is [16, 16, 1, 16], and the model's 8 matrices "
                       "of 32 x 32 need [8, 32, 1, 16]; check"},
        {BLOCKS_CUT, "\"model.layers.1.mlp.experts.down_proj_scales\" is missing;"},
    };
    const char *const settings[] = {"device", "cpu", NULL};
    char *config = family_config("gpt_oss"), name[16];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_grid grid = mt_grid_of_one;
        mt_hf *hf;
        mt_error error;
        read_family("gpt_oss");
        snprintf(name, sizeof name, "%d", (int)i);
        write_folder(name, config, block, MT_U8, cases[i].how, down);
        assert_int_equal(mt_hf_open(&hf, at(name), settings, 1, 8, &grid, &error), -1);
        if (!strstr(error.text, cases[i].words)) fail_msg("\"%s\" does not say \"%s\"", error.text, cases[i].words);
    }
    free(config);
    tensors_free();
}

static void bad_scales_are_refused_by_name(void **state) {
    (void)state;
    static const char up[] = "model.layers.2.mlp.up_proj.weight";
    static const struct {
        fault how;
        const char *tensor, *words;
    } cases[] = {
        {SCALES_MISSING, up, "its scales \"model.layers.2.mlp.up_proj.weight_scale_inv\" are missing"},
        {SCALE_ZERO, up, "\"model.layers.2.mlp.up_proj.weight_scale_inv\"[2, 0] is 0; a scale must be"},
        {SCALE_NEGATIVE, up, "\"model.layers.2.mlp.up_proj.weight_scale_inv\"[2, 0] is -1; a scale must be"},
        {SCALE_NAN, up, "\"model.layers.2.mlp.up_proj.weight_scale_inv\"[2, 0] is nan; a scale must be"},
        {SCALE_INFINITE, "model.layers.2.mlp.down_proj.weight",
         "\"model.layers.2.mlp.down_proj.weight_scale_inv\"[0, 2] is inf; a scale must be"},
        {SCALES_SHAPE, "model.layers.2.mlp.down_proj.weight",
         "\"model.layers.2.mlp.down_proj.weight_scale_inv\" is [3, 1], and"},
        {SCALES_DTYPE, up, "\"model.layers.2.mlp.up_proj.weight_scale_inv\" is F64; scales may be F32"},
        {SCALES_EXTRA, "model.norm.weight", "\"model.norm.weight_scale_inv\" has no place"},
        {CONFIG_PLAIN, up, "\"weight_block_size\""},
        {VECTOR_IN_FP8, "model.norm.weight", "\"model.norm.weight\" is F8_E4M3, which only a matrix may be"},
        {E5M2, up, "\"model.layers.2.mlp.up_proj.weight\" is F8_E5M2; weights may be"},
    };
    const char *const settings[] = {"device", "cpu", NULL};
    char *config = family_config("llama"), name[16];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_grid grid = mt_grid_of_one;
        mt_hf *hf;
        mt_error error;
        read_family("llama");
        snprintf(name, sizeof name, "%d", (int)i);
        write_folder(name, config, (const int64_t[]){32, 32}, MT_F32, cases[i].how, cases[i].tensor);
        assert_int_equal(mt_hf_open(&hf, at(name), settings, 1, 8, &grid, &error), -1);
        if (!strstr(error.text, cases[i].words) || !strchr(error.text, ';') || strchr(error.text, '\n'))
            fail_msg("\"%s\" does not say \"%s\" and the remedy", error.text, cases[i].words);
    }
    free(config);
    tensors_free();
}

int main(void) {
#define ROOT_TEST(test) cmocka_unit_test_setup_teardown(test, make_root, remove_root)
    const struct CMUnitTest tests[] = {
        ROOT_TEST(every_family_loads_the_product_of_codes_and_scales),
        ROOT_TEST(matrices_larger_than_the_buffers_load),
        ROOT_TEST(a_frozen_base_keeps_the_codes_of_a_folder),
        ROOT_TEST(experts_in_mxfp4_load_to_the_values_of_the_grid),
        ROOT_TEST(blocks_of_another_shape_or_without_scales_are_refused),
        ROOT_TEST(bad_scales_are_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
