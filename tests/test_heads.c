/* test_heads.c: models with a value head equal Hugging Face transformers: values, gradients, folders read and written;
 * a language model's folder that gets one; and what is refused. */
// Sections of megatron.c: §10a §15c
#include "../data/base/file.h"
#include "../data/base/safetensors.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/models/hf_config.h"
#include "../data/checkpoint/checkpoint_load.h"
#include "../data/checkpoint/checkpoint_save.h"
#include "../data/checkpoint/run_options.h"
#include "families.h"
#include "folder.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { SEQUENCES = 4, LENGTH = 32, TOKENS = SEQUENCES * LENGTH, CAPACITY = TOKENS + 2 };

/* A folder of tests/golden/tune, opened by a command line. */
typedef struct fixture {
    mt_run_options options;
    mt_model *model;
    mt_batch batch;
    int64_t starts[SEQUENCES], lengths[SEQUENCES]; // of the golden sequences in the batch
} fixture;

static int parse(mt_run_options *o, const char *words, mt_error *error) {
    char line[1024], *arguments[64];
    int count = 0;
    snprintf(line, sizeof line,
             "train --mock-data --seq-length 32 --micro-batch-size 2 --train-iters 2 --lr 1e-3 --device cpu %s", words);
    for (char *word = strtok(line, " "); word; word = strtok(NULL, " ")) arguments[count++] = word;
    if (mt_options_parse(o, MT_PROGRAM_TRAIN, count, arguments, error) != 0) return -1;
    return mt_options_finish(o, MT_PROGRAM_TRAIN, 1, error);
}

/* The mean of the squared values that the reference counts. */
static void squares(const void *config, const mt_loss_tokens *t, mt_loss_sums *sums) {
    const bool *last_only = config;
    for (int64_t s = 0; s < t->num_sequences; s++) {
        const mt_span *span = &t->sequences[s];
        int64_t end = span->q_start + span->q_len;
        for (int64_t i = *last_only ? end - 1 : span->q_start; i < end; i++) {
            if (t->mask[i] == 0) continue;
            sums->loss += t->values[i] * t->values[i], sums->count += 1;
            t->dvalues[i] += 2 * t->values[i];
        }
    }
}

static const bool last_only[] = {true, false};
static const mt_loss losses[] = {{.of_values = true, .host = squares, .config = &last_only[0]},
                                 {.of_values = true, .host = squares, .config = &last_only[1]}};

static void create_model(fixture *f, const mt_loss *loss) {
    mt_error error;
    mt_model_plan plan = {.max_tokens = CAPACITY, .max_logits = CAPACITY, .max_position = LENGTH, .train = true};
    plan.loss = loss;
    if (mt_model_create(&f->model, &f->options.stack, &mt_grid_of_one, &mt_cpu_ops, &plan, &error) != 0)
        fail_msg("%s", error.text);
}

static void create(fixture *f, const char *folder, const mt_loss *loss) {
    mt_error error;
    mt_run_state state = {0};
    create_model(f, loss);
    if (mt_checkpoint_load(f->model, &f->options, &state, folder, &error) != 0) fail_msg("%s: %s", folder, error.text);
}

static void read_all(const char *folder, const char *name, void *to, size_t bytes) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fread(to, 1, bytes, file), bytes);
    fclose(file);
}

/* Appends `count` tokens. */
static void append(mt_batch *batch, const int32_t *tokens, int64_t count, float mask) {
    for (int64_t i = 0; i < count; i++, batch->num_tokens++) {
        batch->tokens[batch->num_tokens] = tokens[i], batch->positions[batch->num_tokens] = (int32_t)i;
        batch->loss_mask[batch->num_tokens] = mask;
    }
}

/* The golden tokens. The reward model's come without their padding. The critic's padding sees the tokens before it;
 * as nothing else sees its keys, two more tokens do, which the loss does not count. */
static void fill(fixture *f, const char *folder, bool without_padding) {
    int32_t tokens[TOKENS];
    char path[512];
    json_error_t problem;
    snprintf(path, sizeof path, "%s/expected.json", folder);
    json_t *expected = json_load_file(path, 0, &problem), *lengths = json_object_get(expected, "lengths");
    read_all(folder, "tokens.i32", tokens, sizeof tokens);
    mt_batch *b = &f->batch;
    mt_batch_alloc(b, CAPACITY);
    for (int s = 0; s < SEQUENCES; s++) {
        int64_t first = b->num_tokens, length = json_integer_value(json_array_get(lengths, (size_t)s));
        int64_t padding = without_padding ? 0 : LENGTH - length, end = first + length;
        f->starts[s] = first, f->lengths[s] = length + padding;
        b->spans[b->num_spans++] = (mt_span){first, length, first, length, true};
        append(b, tokens + s * LENGTH, length + padding, 1);
        for (int64_t i = length; i < length + padding; i++) b->positions[first + i] = (int32_t)i;
        if (padding == 0) continue;
        b->spans[b->num_spans++] = (mt_span){end, padding, first, length, false};
        b->spans[b->num_spans++] = (mt_span){end + padding, 2, end, padding + 2, false};
        append(b, tokens, 2, 0);
    }
    json_decref(expected);
}

static void close_fixture(fixture *f) {
    mt_model_destroy(f->model);
    mt_batch_free(&f->batch);
    mt_options_free(&f->options);
}

static const char *const folders[] = {"tests/golden/tune/reward", "tests/golden/tune/critic"};

/* The critic's head is set by hand: --stage rm trains reward models. */
static void open_head(fixture *f, int head) {
    mt_error error;
    *f = (fixture){0};
    if (parse(&f->options, "--stage rm --load tests/golden/tune/reward", &error) != 0) fail_msg("%s", error.text);
    if (head == 1) f->options.stack.head_type = MT_HEAD_TOKEN;
    create(f, folders[head], &losses[head]);
    fill(f, folders[head], head == 0);
}

static void values_equal_transformers(void **state) {
    (void)state;
    for (int head = 0; head < 2; head++) {
        fixture f;
        open_head(&f, head);
        float expected[TOKENS], values[CAPACITY];
        read_all(folders[head], "logits.f32", expected, head == 0 ? SEQUENCES * 4 : sizeof expected);
        mt_model_forward(f.model, &f.batch, false);
        mt_model_read(f.model, values, NULL, NULL);
        for (int64_t s = 0; s < SEQUENCES; s++)
            for (int64_t i = head == 0 ? f.lengths[s] - 1 : 0; i < f.lengths[s]; i++) {
                double e = expected[head == 0 ? s : s * LENGTH + i], v = values[f.starts[s] + i];
                if (!(fabs(v - e) <= 1e-5))
                    fail_msg("%s: value %lld is %.8g, expected %.8g", folders[head], (long long)(s * LENGTH + i), v, e);
            }
        close_fixture(&f);
    }
}

static void gradients_equal_transformers(void **state) {
    (void)state;
    for (int head = 0; head < 2; head++) {
        fixture f;
        open_head(&f, head);
        mt_error error;
        mt_safetensors *reference;
        char path[512];
        int64_t num_params, num_buckets, seen = 0;
        snprintf(path, sizeof path, "%s/grads.safetensors", folders[head]);
        if (mt_safetensors_open(&reference, path, &error) != 0) fail_msg("%s", error.text);
        mt_model_forward(f.model, &f.batch, true);
        mt_model_backward(f.model);
        const mt_param *params = mt_model_params(f.model, &num_params);
        const mt_bucket *buckets = mt_model_buckets(f.model, &num_buckets);
        double count = head == 0 ? SEQUENCES : TOKENS;
        for (int64_t i = 0; i < num_params; i++) {
            const mt_param *p = &params[i];
            const mt_tensor_info *tensor = mt_safetensors_find(reference, p->hf_name);
            if (!tensor) continue;
            double distance = 0, norm = 0;
            const float *grad = buckets[p->bucket].grads + p->offset, *expected = tensor->data;
            for (int64_t k = 0; k < p->rows * p->cols; k++) {
                double e = expected[k], d = grad[k] / count - e;
                distance += d * d, norm += e * e;
            }
            if (!(sqrt(distance) <= 1e-5 * sqrt(norm)))
                fail_msg("%s: gradient of %s is off by %g of its norm", folders[head], p->hf_name,
                         sqrt(distance / norm));
            seen++;
        }
        assert_int_equal(seen, mt_safetensors_count(reference));
        mt_safetensors_close(reference);
        close_fixture(&f);
    }
}

/* Writes the model to the folder `name` of the root. */
static void save(fixture *f, const char *name) {
    char *config = mt_options_write_hf_config(&f->options), path[64];
    mt_error error;
    mkdir(at(name), 0700);
    snprintf(path, sizeof path, "%s/config.json", name);
    FILE *file = fopen(at(path), "wb");
    fputs(config, file);
    fclose(file), free(config);
    if (mt_safetensors_save_folder(f->model, at(name), "model", 1 << 20, "--save", NULL, &error) != 0)
        fail_msg("%s", error.text);
}

/* Saved and loaded again, config.json too. */
static void folders_are_written_as_they_are_read(void **state) {
    (void)state;
    for (int head = 0; head < 2; head++) {
        fixture f, again = {0};
        open_head(&f, head);
        char *config = mt_options_write_hf_config(&f.options);
        float before[CAPACITY], after[CAPACITY];
        mt_error error;
        assert_int_equal(make_root(state), 0);
        save(&f, "");
        if (parse(&again.options, "--stage rm --load tests/golden/tune/reward", &error) != 0)
            fail_msg("%s", error.text);
        again.options.stack.head_type = MT_HEAD_LM;
        if (mt_options_read_hf_config(&again.options, config, (int64_t)strlen(config), "config.json", &error) != 0)
            fail_msg("%s", error.text);
        assert_int_equal(again.options.stack.head_type, head == 0 ? MT_HEAD_SEQUENCE : MT_HEAD_TOKEN);
        create(&again, root, &losses[head]);
        fill(&again, folders[head], head == 0);
        mt_model_forward(f.model, &f.batch, false), mt_model_read(f.model, before, NULL, NULL);
        mt_model_forward(again.model, &again.batch, false), mt_model_read(again.model, after, NULL, NULL);
        assert_memory_equal(before, after, f.batch.num_tokens * 4);
        close_fixture(&f), close_fixture(&again);
        free(config);
        assert_int_equal(remove_root(state), 0);
    }
}

/* Values of the tokens of the golden reward model, as far as the vocabulary goes. */
static void read_values(fixture *f, float values[CAPACITY]) {
    fill(f, folders[0], true);
    for (int64_t t = 0; t < f->batch.num_tokens; t++) f->batch.tokens[t] %= (int32_t)f->options.stack.vocab_size;
    mt_model_forward(f->model, &f->batch, true);
    mt_model_read(f->model, values, NULL, NULL);
}

/* Saves the model to the folder `name` of the root, and opens that as a model with the head. */
static void save_and_open(fixture *again, fixture *f, const char *name, mt_head_type head) {
    char words[512];
    mt_error error;
    *again = (fixture){0};
    save(f, name);
    snprintf(words, sizeof words, "--stage rm --load %s", at(name));
    if (parse(&again->options, words, &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(again->options.stack.head_type, f->options.stack.head_type);
    again->options.value_head = head != f->options.stack.head_type, again->options.stack.head_type = head;
    create(again, at(name), &losses[head == MT_HEAD_TOKEN]);
}

/* A language model becomes a reward model; that, saved and loaded, begins a critic, which is saved and loaded too. The
 * values stay, since the bias that a critic has begins as 0. */
static mt_hf_family check_heads(const char *folder) {
    fixture f = {0}, reward, critic, again;
    char words[512];
    float values[CAPACITY], others[CAPACITY];
    mt_error error;
    int64_t count;
    bool trains = false;
    snprintf(words, sizeof words, "--stage rm --value-head --load %s", folder);
    if (parse(&f.options, words, &error) != 0) fail_msg("%s: %s", folder, error.text);
    assert_int_equal(f.options.stack.head_type, MT_HEAD_SEQUENCE);
    create(&f, folder, &losses[0]);
    read_values(&f, values);
    mt_model_backward(f.model);
    for (int64_t t = 0; t < f.batch.num_tokens; t++) assert_true(isfinite(values[t]) && values[t] != 0);
    const mt_param *params = mt_model_params(f.model, &count);
    const mt_bucket *buckets = mt_model_buckets(f.model, &(int64_t){0});
    for (int64_t i = 0; i < count; i++)
        if (params[i].role == MT_SCORE) trains = buckets[params[i].bucket].grads[params[i].offset] != 0;
    assert_true(trains);
    save_and_open(&reward, &f, "reward", MT_HEAD_SEQUENCE), read_values(&reward, others);
    assert_memory_equal(values, others, f.batch.num_tokens * 4);
    save_and_open(&critic, &reward, "start", MT_HEAD_TOKEN), read_values(&critic, others);
    assert_memory_equal(values, others, f.batch.num_tokens * 4);
    save_and_open(&again, &critic, "critic", MT_HEAD_TOKEN), read_values(&again, others);
    assert_memory_equal(values, others, f.batch.num_tokens * 4);
    mt_hf_family family = again.options.stack.hf_family;
    assert_int_equal(family, f.options.stack.hf_family);
    close_fixture(&f), close_fixture(&reward), close_fixture(&critic), close_fixture(&again);
    return family;
}

#define ROTARY                                                                                                         \
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --vocab-size 61 --swiglu "           \
    "--position-embedding-type rope --disable-bias-linear"

static void every_family_gets_a_value_head(void **state) {
    static const char *const others[] = {ROTARY " --normalization RMSNorm --window-size 8", ROTARY}; // without files
    // without its modules MiMo is Qwen 2; an encoder-decoder has no other head
    uint64_t seen = 1ull << MT_HF_MIMO | 1ull << MT_HF_T5;
    for (int i = 0; i < NUM_FAMILIES; i++) {
        char folder[512];
        snprintf(folder, sizeof folder, "tests/golden/hf/%s", families[i]);
        assert_int_equal(make_root(state), 0);
        seen |= 1ull << check_heads(folder);
        assert_int_equal(remove_root(state), 0);
    }
    for (int i = 0; i < 2; i++) {
        fixture f = {0};
        mt_error error;
        assert_int_equal(make_root(state), 0);
        if (parse(&f.options, others[i], &error) != 0) fail_msg("%s", error.text);
        create_model(&f, NULL);
        mt_model_init(f.model);
        save(&f, "base");
        seen |= 1ull << check_heads(at("base"));
        close_fixture(&f);
        assert_int_equal(remove_root(state), 0);
    }
    for (int family = 1; family < MT_NUM_HF_FAMILIES; family++)
        if (!(seen >> family & 1)) fail_msg("no model is of the family %s", mt_hf_family_name(family));
}

static void expect_refusal(const char *words, const char *part) {
    mt_run_options o;
    mt_error error = {{0}};
    if (parse(&o, words, &error) == 0) fail_msg("%s is accepted", words);
    if (!strstr(error.text, part)) fail_msg("%s: \"%s\" is not in: %s", words, part, error.text);
    mt_options_free(&o);
}

static void contradictions_are_refused(void **state) {
    (void)state;
    expect_refusal("--stage rm --load tests/golden/hf/llama", "--value-head gives it a value head");
    expect_refusal("--stage rm --value-head --load tests/golden/tune/reward", "leave it out");
    expect_refusal("--stage dpo --load tests/golden/tune/reward", "--stage rm");
    expect_refusal("--load tests/golden/tune/critic", "--stage rm");
    expect_refusal("--value-head --load tests/golden/hf/llama", "--stage");
    expect_refusal("--stage dpo --load tests/golden/hf/llama --mtp-num-layers 1", "--mtp-num-layers");
    expect_refusal("--beta 0.2 --load tests/golden/hf/llama", "--stage dpo");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(values_equal_transformers),
        cmocka_unit_test(gradients_equal_transformers),
        cmocka_unit_test(folders_are_written_as_they_are_read),
        cmocka_unit_test(every_family_gets_a_value_head),
        cmocka_unit_test(contradictions_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
