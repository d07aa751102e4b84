/* Options: command line, YAML, config.json, derivation and every class of bad input. */
// Sections of megatron.c: §2 §8 §9a
#include "../cuda/limits.h"
#include "../data/base/file.h"
#include "../data/base/signals.h"
#include "../data/options/megatron_names.h"
#include "../data/options/option_help.h"
#include "../data/options/option_reader.h"
#include "../data/options/option_rules.h"
#include "../data/options/option_table.h"
#include "../data/options/option_typed.h"
#include "../data/options/option_warn.h"
#include "../data/options/options.h"
#include "../data/models/hf_config.h"
#include "../data/checkpoint/run_options.h"
#include "../data/report/report.h"

#include <fcntl.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* A complete run, except for the options that a test adds. */
#define SHAPE " --num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 300 --seq-length 16 "
#define RUN   SHAPE "--mock-data --train-iters 10 --lr 1e-3 "

/* Parses a command line given as one string, words between blanks, then finishes it for `world_size` ranks. */
static int parse(mt_run_options *options, mt_program program, int64_t world_size, const char *line, mt_error *error) {
    char *copy = mt_strdup(line), *words[128] = {"program"};
    int count = 1;
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " ")) words[count++] = word;
    int result = mt_options_parse(options, program, count, words, error);
    if (result == 0) result = mt_options_finish(options, program, world_size, error);
    free(copy);
    return result;
}

static void expect_good(mt_run_options *options, const char *line) {
    mt_error error;
    if (parse(options, MT_PROGRAM_TRAIN, 1, line, &error)) fail_msg("%s\n  gave: %s", line, error.text);
}

static void expect_error_of(mt_program program, int64_t world_size, const char *line, const char *expected) {
    mt_run_options options;
    mt_error error = {""};
    if (parse(&options, program, world_size, line, &error) == 0) fail_msg("%s\n  was accepted", line);
    if (!strstr(error.text, expected)) fail_msg("%s\n  gave: %s\n  not: %s", line, error.text, expected);
    if (strchr(error.text, '\n')) fail_msg("more than one line: %s", error.text);
    mt_options_free(&options);
}

static void expect_error(const char *line, const char *expected) {
    expect_error_of(MT_PROGRAM_TRAIN, 1, line, expected);
}

static char *read_text(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) fail_msg("%s cannot be read", path);
    char *text = mt_calloc(1 << 16);
    assert_true(fread(text, 1, (1 << 16) - 1, file) > 0);
    fclose(file);
    return text;
}

/* A new folder under the temporary files; remove_folder takes it and its config.json away again. */
static char *make_folder(void) {
    char *folder = mt_strdup("/tmp/mt_test_options_XXXXXX");
    assert_non_null(mkdtemp(folder));
    return folder;
}

static char *write_file(const char *folder, const char *name, const char *text) {
    size_t bytes = strlen(folder) + strlen(name) + 2;
    char *path = mt_malloc((int64_t)bytes);
    snprintf(path, bytes, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, strlen(text), file), strlen(text));
    assert_int_equal(fclose(file), 0);
    return path;
}

static void remove_file(char *path) {
    assert_int_equal(unlink(path), 0);
    free(path);
}

static void remove_folder(char *folder) {
    assert_int_equal(rmdir(folder), 0);
    free(folder);
}

/* ---- the command line */

static void defaults_are_those_of_megatron(void **state) {
    (void)state;
    mt_run_options options;
    mt_options_default(&options);
    assert_true(options.add_bias_linear && !options.stack.swiglu && !options.stack.untie_embeddings_and_output_weights);
    assert_true(options.stack.hidden_dropout == 0.1 && options.stack.attention_dropout == 0.1 &&
                options.stack.norm_epsilon == 1e-5);
    assert_true(options.stack.adam_beta1 == 0.9 && options.stack.adam_beta2 == 0.999 && options.stack.adam_eps == 1e-8);
    assert_true(options.stack.clip_grad == 1 && options.weight_decay == 0.01 && options.stack.init_method_std == 0.02);
    assert_true(options.stack.rotary_base == 10000 && options.stack.rotary_percent == 1 && options.stack.min_lr == 0);
    assert_int_equal(options.stack.seed, 1234);
    assert_int_equal(options.eval_iters, 100);
    assert_int_equal(options.eval_interval, 1000);
    assert_int_equal(options.make_vocab_size_divisible_by, 128);
    assert_int_equal(options.stack.normalization, MT_LAYERNORM);
    assert_int_equal(options.stack.position_embedding_type, MT_POSITION_LEARNED_ABSOLUTE);
    assert_int_equal(options.stack.lr_decay_style, MT_LR_LINEAR);
    assert_string_equal(options.split, "969,30,1");
    assert_int_equal(options.dataloader_type, MT_DATALOADER_SINGLE);
    mt_options_free(&options);
}

static void command_line_sets_every_type(void **state) {
    (void)state;
    mt_run_options options;
    expect_good(&options, SHAPE "--train-iters=12 --lr 2.5e-4 --lr-decay-style cosine --disable-bias-linear --bf16 "
                                "--data-path 1 a 2 b --save out --seed 7 --lr 3e-4");
    assert_int_equal(options.stack.train_iters, 12);
    assert_true(options.stack.lr == 3e-4); // the last one wins
    assert_int_equal(options.stack.lr_decay_style, MT_LR_COSINE);
    assert_true(!options.add_bias_linear && !options.stack.mlp_bias && options.stack.bf16);
    assert_int_equal(options.data_path.count, 4);
    assert_string_equal(options.data_path.items[3], "b");
    assert_string_equal(options.save, "out");
    assert_int_equal(options.stack.seed, 7);
    mt_options_free(&options);
}

static void shape_is_derived_as_megatron_does(void **state) {
    (void)state;
    mt_run_options options;
    expect_good(&options, RUN);
    assert_int_equal(options.stack.ffn_hidden_size, 256);
    assert_int_equal(options.stack.kv_channels, 16);
    assert_int_equal(options.stack.num_query_groups, 4);
    assert_int_equal(options.stack.padded_vocab_size, 384);
    assert_int_equal(options.stack.max_position_embeddings, 16);
    assert_int_equal(options.stack.global_batch_size, 1);
    assert_int_equal(options.stack.num_iterations, 10);
    assert_true(options.stack.add_qkv_bias && options.stack.attention_output_bias && options.stack.mlp_bias);
    assert_true(options.stack.start_weight_decay == 0.01 && options.stack.end_weight_decay == 0.01);
    mt_options_free(&options);
    expect_good(&options, RUN "--swiglu --hidden-size 256 --group-query-attention --make-vocab-size-divisible-by 1");
    assert_int_equal(options.stack.ffn_hidden_size, 640); // 4 * 256 * 2/3 = 682, down to a multiple of 64
    assert_int_equal(options.stack.num_query_groups, 1);
    assert_int_equal(options.stack.padded_vocab_size, 300);
    mt_options_free(&options);
}

static void finish_twice_changes_nothing(void **state) {
    (void)state;
    mt_run_options options;
    mt_error error;
    char first[4096] = "", second[4096] = "";
    expect_good(&options, RUN "--swiglu --position-embedding-type rope --use-rope-scaling --global-batch-size 8");
    FILE *file = fmemopen(first, sizeof first, "w");
    mt_options_print(&options, MT_PROGRAM_TRAIN, file);
    fclose(file);
    assert_int_equal(mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error), 0);
    file = fmemopen(second, sizeof second, "w");
    mt_options_print(&options, MT_PROGRAM_TRAIN, file);
    fclose(file);
    assert_string_equal(first, second);
    assert_non_null(strstr(first, "rope-scaling-type"));
    mt_options_free(&options);
}

static void vocabulary_may_come_from_the_tokenizer_after_parsing(void **state) {
    (void)state;
    mt_run_options options;
    mt_error error;
    char *words[] = {"train",
                     "--num-layers",
                     "1",
                     "--hidden-size",
                     "8",
                     "--num-attention-heads",
                     "1",
                     "--seq-length",
                     "8",
                     "--mock-data",
                     "--train-iters",
                     "1",
                     "--lr",
                     "1",
                     "--tokenizer-type",
                     "ByteLevel"};
    assert_int_equal(mt_options_parse(&options, MT_PROGRAM_TRAIN, 16, words, &error), 0);
    assert_int_equal(options.stack.vocab_size, 0);
    assert_int_equal(mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error), -1);
    assert_non_null(strstr(error.text, "--vocab-size"));
    options.stack.vocab_size = 257;
    assert_int_equal(mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error), 0);
    assert_int_equal(options.stack.padded_vocab_size, 384);
    mt_options_free(&options);
}

/* All of "a|b" are choices of the option. */
static void assert_choices(const mt_option *row, const char *choices) {
    char words[160], *rest = NULL;
    assert_true(row->type == MT_CHOICE || row->type == MT_SET || row->type == MT_CHOICES);
    snprintf(words, sizeof words, "%s", choices);
    for (char *word = strtok_r(words, "|", &rest); word; word = strtok_r(NULL, "|", &rest))
        if (mt_choice_index(row->values, word) < 0) fail_msg("--%s: %s?", row->name, word);
}

/* Every name and choice in the columns `needs` and `excludes` is an option's; every default is in its range. */
static void the_table_of_options_is_sound(void **state) {
    (void)state;
    mt_run_options options, given;
    mt_error error;
    mt_options_default(&options);
    mt_options_default(&given);
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name) continue;
        const char *columns[] = {row->needs, row->excludes};
        mt_option_rule rule;
        for (int i = 0; i < 2; i++)
            for (const char *column = columns[i]; mt_option_next_rule(&column, &rule);) {
                if (rule.condition && strcmp(rule.condition, "any") != 0) assert_choices(row, rule.condition);
                if (rule.choices) assert_choices(rule.other, rule.choices);
            }
        if (row->fallback && mt_options_set(&given, row->name, row->fallback, &error)) fail_msg("%s", error.text);
    }
    if (mt_options_check_ranges(&given, MT_PROGRAM_LIBRARY, &error)) fail_msg("%s", error.text);
    mt_options_free(&options);
    mt_options_free(&given);
}

static void options_are_set_by_name(void **state) {
    (void)state;
    mt_run_options o;
    mt_error error;
    mt_options_default(&o);
    assert_int_equal(mt_options_set(&o, "lr", "1e-3", &error), 0);
    assert_int_equal(mt_options_set(&o, "micro_batch_size", "4", &error), 0);
    assert_int_equal(mt_options_set(&o, "--disable-bias-linear", "true", &error), 0);
    assert_int_equal(mt_options_set(&o, "normalization", "RMSNorm", &error), 0);
    assert_int_equal(mt_options_set(&o, "data-path", "0.3 a 0.7 b", &error), 0);
    assert_int_equal(mt_options_set(&o, "data-path", "1 a  2 b", &error), 0); // replaces the list
    assert_int_equal(mt_options_set(&o, "rampup-batch-size", "2 2 100", &error), 0);
    assert_int_equal(mt_options_set(&o, "temperature", "0.5", &error), 0); // an option of infer
    assert_true(o.stack.lr == 1e-3 && o.stack.micro_batch_size == 4 && !o.add_bias_linear &&
                o.stack.normalization == MT_RMSNORM);
    assert_true(MT_GIVEN(&o, stack.lr) && !MT_GIVEN(&o, stack.seed) && o.stack.temperature == 0.5);
    assert_int_equal(o.data_path.count, 4);
    assert_string_equal(o.data_path.items[2], "2");
    assert_int_equal(o.rampup_batch_size.count, 3);
    assert_int_equal(o.rampup_batch_size.items[2], 100);
    const char *const wrong[][3] = {{"lr", "abc", "--lr expects a number, got 'abc'"},
                                    {"normalisation", "RMSNorm", "did you mean --normalization?"},
                                    {"bf16", "maybe", "--bf16 expects true or false"},
                                    {"device", "tpu", "--device expects auto|cpu|cuda, got 'tpu'"},
                                    {"rampup-batch-size", "2 2 1 1", "--rampup-batch-size expects START INCREMENT"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(mt_options_set(&o, wrong[i][0], wrong[i][1], &error), -1);
        if (!strstr(error.text, wrong[i][2])) fail_msg("%s", error.text);
    }
    mt_options_free(&o);
}

/* Training on arrays in memory: no data, no tokenizer. */
static void a_program_with_its_own_data_needs_no_option_of_data(void **state) {
    (void)state;
    const char *const words[][2] = {{"num-layers", "2"},  {"hidden-size", "64"},    {"num-attention-heads", "4"},
                                    {"vocab-size", "99"}, {"seq-length", "16"},     {"train-iters", "10"},
                                    {"lr", "1e-3"},       {"micro-batch-size", "2"}};
    mt_run_options o;
    mt_error error;
    mt_options_default(&o);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        assert_int_equal(mt_options_set(&o, words[i][0], words[i][1], &error), 0);
    assert_int_equal(mt_options_finish(&o, MT_PROGRAM_TRAIN, 1, &error), -1);
    assert_non_null(strstr(error.text, "give one source of data"));
    if (mt_options_finish(&o, MT_PROGRAM_LIBRARY, 1, &error)) fail_msg("%s", error.text);
    assert_true(o.stack.num_iterations == 10 && o.stack.global_batch_size == 2 && o.stack.padded_vocab_size == 128);
    o.stack.vocab_size = 0;
    assert_int_equal(mt_options_finish(&o, MT_PROGRAM_LIBRARY, 1, &error), -1);
    assert_non_null(strstr(error.text, "--vocab-size"));
    mt_options_free(&o);
}

static void malformed_command_lines_are_refused_in_one_line(void **state) {
    (void)state;
    expect_error(RUN "--num-layer 3", "unknown option --num-layer; did you mean --num-layers?");
    expect_error(RUN "--hiden-sise 3", "did you mean --hidden-size?");
    expect_error(RUN "--qwertyuiop 3", "unknown option --qwertyuiop; --help lists them all");
    expect_error(RUN "--prompt hello", "--prompt is an option of infer, not of train");
    expect_error(RUN "--lr", "--lr expects a number, got nothing");
    expect_error(RUN "--lr --bf16", "--lr expects a number, got nothing");
    expect_error(RUN "--lr abc", "--lr expects a number, got 'abc'");
    expect_error(RUN "--lr 1e", "--lr expects a number, got '1e'");
    expect_error(RUN "--lr inf", "--lr expects a number, got 'inf'");
    expect_error(RUN "--lr 1e999", "--lr expects a number");
    expect_error(RUN "--num-layers 2.5", "--num-layers expects a whole number, got '2.5'");
    expect_error(RUN "--num-layers 0x10", "--num-layers expects a whole number");
    expect_error(RUN "--num-layers 99999999999999999999", "--num-layers expects a whole number");
    expect_error(RUN "stray", "unexpected argument 'stray'");
    expect_error(RUN "-x", "unexpected argument '-x'");
    expect_error(RUN "--bf16=maybe", "--bf16 expects true or false");
    expect_error(RUN "--bf16 maybe", "'maybe' after --bf16, which takes true, false or nothing");
    expect_error(RUN "--lr 1e-3 2e-3", "'2e-3' after --lr, which takes one value");
    expect_error(RUN "--train-iters 0", "--train-iters 0 leaves no step; say how long to train");
    expect_error(RUN "--train-samples 64", "--train-iters and --train-samples exclude each other");
    expect_error(RUN "--device tpu", "--device expects auto|cpu|cuda, got 'tpu'");
    expect_error(RUN "--normalization rms", "--normalization expects LayerNorm|RMSNorm, got 'rms'");
    expect_error(RUN "--save=", "--save expects DIR, got nothing");
    expect_error(RUN "--data-path", "--data-path expects PREFIX");
}

static void values_out_of_range_are_refused(void **state) {
    (void)state;
    expect_error(RUN "--num-layers 0", "--num-layers must be in [1,10000], got 0");
    expect_error(RUN "--num-layers -3", "--num-layers must be in [1,10000], got -3");
    expect_error(RUN "--hidden-dropout 1", "--hidden-dropout must be in [0,1), got 1");
    expect_error(RUN "--attention-dropout -0.1", "--attention-dropout must be in [0,1)");
    expect_error(RUN "--adam-beta2 1", "--adam-beta2 must be in [0,1), got 1");
    expect_error(RUN "--lr 0", "--lr must be in (0,1e6], got 0");
    expect_error(RUN "--rotary-percent 0", "--rotary-percent must be in (0,1]");
    expect_error(RUN "--micro-batch-size 0", "--micro-batch-size must be in");
    expect_error(RUN "--seed -1", "--seed must be in");
    expect_error(RUN "--seed 4294967296", "--seed must be in [0,4294967295], got 4294967296");
    expect_error(RUN "--seq-length 1073741824", "--seq-length must be in [1,1073741823], got 1073741824");
    expect_error(RUN "--hidden-size 1048576 --num-layers 10000 --num-attention-heads 1024 --ffn-hidden-size 16777216",
                 "parameters; at most");
}

static void shapes_that_cannot_be_are_refused(void **state) {
    (void)state;
    expect_error("--mock-data --train-iters 1 --lr 1 --seq-length 8 --vocab-size 9", "--num-layers is missing");
    expect_error(
        "--num-layers 1",
        "the run lacks the model (--load, --hf-config, or --num-layers, --hidden-size and --num-attention-heads); "
        "its vocabulary (--vocab-size, or --tokenizer-type and --tokenizer-model); --seq-length; data "
        "(--data-path, --train-data-path, --tokens-file or --mock-data); the length of training (--train-iters "
        "or --train-samples); --lr");
    expect_error(RUN "--num-attention-heads 5",
                 "--hidden-size 64 must be a multiple of --num-attention-heads (without --kv-channels) = 5");
    expect_error(RUN "--num-query-groups 2 --group-query-attention=False",
                 "--num-query-groups 2 needs --group-query-attention");
    expect_error(RUN "--group-query-attention --num-query-groups 3",
                 "--num-attention-heads 4 must be a multiple of --num-query-groups 3");
    expect_error(RUN "--position-embedding-type rope --kv-channels 15", "(for RoPE) = 15 must be a multiple of 2");
    expect_error(RUN "--swiglu --openai-gelu", "--swiglu and --openai-gelu exclude each other");
    expect_error(RUN "--moe-router-linear-bias", "--moe-router-linear-bias needs --num-experts");
    expect_error(RUN "--quick-geglu --swiglu", "--quick-geglu and --swiglu exclude each other");
    expect_error(RUN "--activation-func-clamp-value 7", "--activation-func-clamp-value needs a gated MLP");
    expect_error(RUN "--squared-relu --glu-linear-offset 1", "--glu-linear-offset needs a gated MLP");
    expect_error(RUN "--swiglu --hidden-size 16", "--ffn-hidden-size is missing");
    expect_error(RUN "--rotary-base 5", "--rotary-base needs --position-embedding-type rope");
    expect_error(RUN "--position-embedding-type rope --use-rope-scaling --rope-scaling-type linear",
                 "--rope-scaling-type linear and --use-rope-scaling exclude each other");
    expect_error(RUN "--position-embedding-type rope --rope-scaling-factor 2",
                 "--rope-scaling-factor needs --rope-scaling-type linear|llama3|yarn, not none");
    expect_error(RUN "--position-embedding-type rope --use-rope-scaling --yarn-mscale 2", "--yarn-mscale needs");
    expect_error(RUN "--rope-scaling-type linear", "--rope-scaling-type needs --position-embedding-type rope");
    expect_error(RUN "--position-embedding-type rope --rope-scaling-type yarn", "needs --rope-scaling-factor");
    expect_error(RUN "--position-embedding-type rope --rope-scaling-type yarn --rope-scaling-factor 4",
                 "needs --original-max-position-embeddings");
    expect_error(RUN "--max-position-embeddings 8", "--seq-length 16 is more than --max-position-embeddings 8");
    expect_error(
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --mock-data --train-iters 1 --lr 1",
        "the vocabulary is unknown");
}

/* A program that fills the struct itself meets the same rules. */
static void rules_between_values_hold_for_a_struct(void **state) {
    (void)state;
    static const struct {
        const char *set[5], *expected;
    } cases[] = {
        {{"swiglu", "true", "openai-gelu", "true"}, "--swiglu and --openai-gelu exclude each other"},
        {{"multi-latent-attention", "true", "qk-layernorm", "true"}, "needs --normalization RMSNorm"},
        {{"rope-scaling-type", "llama3"}, "--rope-scaling-type needs --position-embedding-type rope"},
        {{"num-query-groups", "3", "group-query-attention", "true"}, "must be a multiple of --num-query-groups 3"},
        {{"hidden-size", "66"}, "--hidden-size 66 must be a multiple of --num-attention-heads"},
        {{"tp-comm-overlap", "true"}, "--tp-comm-overlap needs --sequence-parallel"},
        {{"overlap-param-gather", "true"}, "--overlap-param-gather needs --overlap-grad-reduce"},
        {{"attention-backend", "cudnn"}, "--attention-backend cudnn needs --bf16"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_run_options options;
        mt_error error;
        expect_good(&options, RUN);
        for (const char *const *at = cases[i].set; *at; at += 2)
            assert_int_equal(mt_options_set(&options, at[0], at[1], &error), 0);
        assert_int_equal(mt_options_set(&options, "load", "folder", &error), 0);
        memset(options.given, 0, sizeof options.given);
        if (strcmp(cases[i].set[0], "hidden-size") == 0) options.stack.kv_channels = 0;
        for (int k = 0; k < 2; k++) {
            assert_int_equal(mt_options_finish(&options, k ? MT_PROGRAM_INFER : MT_PROGRAM_LIBRARY, 1, &error), -1);
            if (!strstr(error.text, cases[i].expected)) fail_msg("%s: %s", cases[i].set[0], error.text);
        }
        mt_options_free(&options);
    }
}

static void a_hybrid_pattern_names_the_one_half_of_every_layer(void **state) {
    (void)state;
    mt_run_options o;
#define SIZES                                                                                                          \
    "--hidden-size 64 --num-attention-heads 4 --vocab-size 300 --seq-length 16 --mock-data --train-iters 10 --lr "     \
    "1e-3 "
    expect_good(&o, SIZES "--hybrid-override-pattern M*-M --mamba-head-dim 16");
    enum { MIXER_NORM = 1 << MT_NORM_MIXER_IN, MLP_NORM = 1 << MT_NORM_FEED_FORWARD_IN }; // of the half that is there
    static const mt_layer_kind kinds[] = {
        {.mixer = MT_MIXER_MAMBA2, .feed_forward = MT_FEED_FORWARD_NONE, .norms = MIXER_NORM},
        {.mixer = MT_MIXER_ATTENTION, .feed_forward = MT_FEED_FORWARD_NONE, .norms = MIXER_NORM},
        {.mixer = MT_MIXER_NONE, .feed_forward = MT_FEED_FORWARD_DENSE, .norms = MLP_NORM},
        {.mixer = MT_MIXER_MAMBA2, .feed_forward = MT_FEED_FORWARD_NONE, .norms = MIXER_NORM}};
    assert_int_equal(o.stack.num_layers, 4);
    assert_int_equal(o.stack.mamba_num_heads, 8); // 2 x hidden size / channels of a head
    for (int64_t i = 0; i < 4; i++) {
        mt_layer_kind expected = kinds[i];
        expected.groups = o.stack.num_query_groups;
        assert_true(mt_layer_kinds_equal(mt_layer_kind_of(&o.stack, i), expected));
    }
    mt_options_free(&o);
    // modules have the halves that follow each /, which Megatron-Core before 0.19 gives by an option of its own
    static const char *const modules[] = {"--hybrid-override-pattern M*-M/*-/*-",
                                          "--hybrid-override-pattern M*-M --mtp-num-layers 2 "
                                          "--mtp-hybrid-override-pattern *-"};
    for (int i = 0; i < 2; i++) {
        char line[512];
        snprintf(line, sizeof line, "%s--position-embedding-type none --mamba-head-dim 16 %s", SIZES, modules[i]);
        expect_good(&o, line);
        mt_layer_kind kind = mt_layer_kind_of(&o.stack, 4);
        assert_true(o.stack.num_layers == 4 && o.stack.mtp_num_layers == 2);
        assert_true(kind.mixer == MT_MIXER_ATTENTION && kind.feed_forward == MT_FEED_FORWARD_DENSE);
        assert_string_equal(o.hybrid_override_pattern, "M*-M");
        assert_string_equal(o.stack.mtp_hybrid_layers, "*-");
        mt_options_free(&o);
    }
    mt_error error;
    if (parse(&o, MT_PROGRAM_TRAIN, 2,
              SIZES "--pipeline-model-parallel-size 2 --position-embedding-type none --mamba-head-dim 16 "
                    "--hybrid-override-pattern M*|-M/-/-",
              &error) != 0)
        fail_msg("%s", error.text);
    assert_string_equal(o.stack.pipeline_letters, "Ett|ttmmL");
    mt_options_free(&o);
    expect_error(RUN "--hybrid-override-pattern Mx",
                 "expects a letter for each layer of * (attention), - (MLP), E (experts), M (Mamba-2), got");
    expect_error(RUN "--hybrid-override-pattern M+",
                 "has latent attention (+), which layers with one half do not have");
    expect_error(RUN "--hybrid-override-pattern GM", "has gated delta nets (G), which");
    expect_error(RUN "--fim-data", "--fim-data and --mock-data exclude each other");
    expect_error(RUN "--fim-rate 0.25", "--fim-rate needs --fim-data");
    expect_error(RUN "--logits-save-top-p 1", "files of a teacher's logits");
    expect_error(RUN "--hybrid-override-pattern M*-M", "has 4 letters, and --num-layers is 2; make them equal");
    expect_error(RUN "--hybrid-override-pattern M", "has 1 letters, and --num-layers is 2; make them equal");
    expect_error(RUN "--hybrid-override-pattern ME", "has layers of experts (E); give --num-experts");
    expect_error(RUN "--hybrid-override-pattern M- --num-experts 4", "gives no layer experts; leave out --num-experts");
    expect_error(RUN "--hybrid-override-pattern M- --mtp-num-layers 1", "--mtp-hybrid-override-pattern is missing");
    expect_error(RUN "--hybrid-override-pattern M- --mamba-num-heads 9 --mamba-num-groups 2",
                 "--mamba-num-heads 9 must be a multiple of --mamba-num-groups 2");
    expect_error(RUN "--hybrid-override-pattern M- --mamba-dt-limit-low 0.5 --mamba-dt-limit-high 0.1",
                 "--mamba-dt-limit-high 0.1 is less than --mamba-dt-limit-low 0.5");
    expect_error(RUN "--hybrid-override-pattern *- --mamba-state-dim 16", "--mamba-state-dim needs layers of Mamba-2");
    expect_error(RUN "--mamba-num-groups 2", "--mamba-num-groups needs layers of Mamba-2");
    expect_error(RUN "--linear-conv-kernel-dim 2", "--linear-conv-kernel-dim needs layers with short convolutions");
    expect_error(RUN "--experimental-attention-variant mamba2", "needs --linear-attention-freq");
    expect_error(RUN "--experimental-attention-variant kda --linear-attention-freq 2 --linear-num-key-heads 4 "
                     "--linear-num-value-heads 8",
                 "kda has as many heads of values as of keys, of as many channels");
    expect_error_of(MT_PROGRAM_TRAIN, 4,
                    RUN "--hybrid-override-pattern M- --mamba-num-groups 2 --context-parallel-size 4 --cp-comm-type "
                        "a2a+p2p --hierarchical-context-parallel-sizes 2 2",
                    "--cp-comm-type a2a+p2p does not run with layers of Mamba-2, whose states");
    expect_error_of(
        MT_PROGRAM_TRAIN, 2,
        RUN "--hybrid-override-pattern M- --mamba-num-groups 3 --mamba-num-heads 6 --tensor-model-parallel-size 2",
        "--mamba-num-groups 3 must be a multiple or a divisor of --tensor-model-parallel-size 2");
#undef SIZES
}

static void latent_attention_that_cannot_be_is_refused(void **state) {
    (void)state;
#define LATENT_RUN RUN "--normalization RMSNorm --position-embedding-type rope --multi-latent-attention "
    expect_error(RUN "--kv-lora-rank 16", "--kv-lora-rank needs --multi-latent-attention");
    expect_error(RUN "--latent-norm-epsilon 1e-6", "--latent-norm-epsilon needs --multi-latent-attention");
    expect_error(RUN "--multi-latent-attention --qk-layernorm --position-embedding-type rope",
                 "--multi-latent-attention with --qk-layernorm needs --normalization RMSNorm, not LayerNorm");
    expect_error(RUN "--rotary-interleaved", "--rotary-interleaved needs --position-embedding-type rope");
    mt_run_options options; // in Megatron-LM, latent attention has RoPE in any case
    expect_good(&options, RUN "--multi-latent-attention --no-position-embedding");
    assert_int_equal(options.stack.position_embedding_type, MT_POSITION_ROPE);
    assert_false(options.stack.qk_layernorm);
    mt_options_free(&options);
    expect_good(&options, RUN "--multi-latent-attention --position-embedding-type none --norm-epsilon 1e-4");
    assert_int_equal(options.stack.position_embedding_type, MT_POSITION_NONE);
    assert_true(options.stack.latent_norm_epsilon == 1e-4);
    mt_options_free(&options);
    expect_error(LATENT_RUN "--group-query-attention", "and --group-query-attention exclude each other");
    expect_error(LATENT_RUN "--num-query-groups 2",
                 "--num-query-groups 2 must be a multiple of --num-attention-heads (for --m");
    expect_error(LATENT_RUN "--add-qkv-bias", "and --add-qkv-bias exclude each other");
    expect_error(LATENT_RUN "--rotary-percent 0.5", "and --rotary-percent exclude each other");
    expect_error(RUN "--normalization RMSNorm --position-embedding-type none --multi-latent-attention "
                     "--qk-pos-emb-head-dim 7",
                 "--qk-pos-emb-head-dim 7 must be a multiple of 2");
    expect_error(LATENT_RUN "--qk-pos-emb-head-dim 7", "--qk-pos-emb-head-dim 7 must be a multiple of 2");
    expect_error(LATENT_RUN "--kv-lora-rank 0", "--kv-lora-rank must be in [1,1048576], got 0");
    expect_error_of(MT_PROGRAM_TRAIN, 8, LATENT_RUN "--tensor-model-parallel-size 8",
                    "--num-attention-heads 4 must be a multiple of --tensor-model-parallel-size 8");
    expect_error("--load tests/golden/hf/deepseek_v3_dense --kv-lora-rank 8 --mock-data --seq-length 8 --train-iters 1 "
                 "--lr 1",
                 "--kv-lora-rank is 8, but the weights have 12");
}

static void the_timeout_of_the_start_is_also_that_of_steps_and_the_least_of_saves(void **state) {
    (void)state;
    mt_run_options options;
    expect_good(&options, RUN "--distributed-timeout-minutes 45");
    assert_int_equal(options.stack.distributed_timeout_seconds, 2700);
    assert_int_equal(options.stack.save_timeout_seconds, 2700);
    mt_options_free(&options);
    expect_good(&options, RUN "--distributed-timeout-minutes 45 --distributed-timeout-seconds-after-init 5 "
                              "--save-timeout-seconds 7");
    assert_int_equal(options.stack.distributed_timeout_seconds, 5);
    assert_int_equal(options.stack.save_timeout_seconds, 7);
    mt_options_free(&options);
}

/* The same setting may be given twice, by two names or in two forms; two values of it are refused. */
static void values_that_agree_are_no_contradiction(void **state) {
    (void)state;
    static const struct {
        const char *both, *agrees, *differs; // options, then those of the second form
        const char *words;
    } rows[] = {
        {"--norm-epsilon 1e-6", "--layernorm-epsilon 0.000001", "--layernorm-epsilon 1e-5", "two names of one option"},
        {"", "--learning-rate 0.001", "--learning-rate 0.002", "--lr 0.001 and --learning-rate 0.002 are two names"},
        {"", "--max-steps 10", "--max-steps 11", "are two names of one option, with two values"},
        {"--num-experts 4", "--num-moe-experts 4", "--num-moe-experts 8", "two names of one option"},
        {"--disable-bias-linear", "--add-bias-linear false", "--add-bias-linear",
         "--disable-bias-linear and --add-bias-linear are two names of one option"},
        {"--attention-backend unfused", "--use-flash-attn false", "--use-flash-attn",
         "--attention-backend unfused and --use-flash-attn flash are two names of one option"},
        {"--global-batch-size 4", "--train-samples 40", "--train-samples 41",
         "--train-iters and --train-samples exclude each other unless they agree"},
        {"--global-batch-size 8 --micro-batch-size 2", "--gradient-accumulation-steps 4",
         "--gradient-accumulation-steps 2", "exclude each other unless they agree"},
        {"--lr-warmup-iters 2", "--lr-warmup-fraction 0.2", "--lr-warmup-fraction 0.3",
         "exclude each other unless they agree"},
        {"--position-embedding-type rope --rope-scaling-type linear --rope-scaling-factor 4",
         "--rotary-seq-len-interpolation-factor 4", "--rotary-seq-len-interpolation-factor 2",
         "exclude each other unless they agree"},
        {"--position-embedding-type rope --rope-scaling-type llama3", "--use-rope-scaling",
         "--rotary-seq-len-interpolation-factor 2", "exclude each other"},
        {"--stage dpo --tokenizer-type ByteLevel --ipo", "--preference-loss ipo", "--preference-loss sigmoid",
         "--ipo and --preference-loss exclude each other unless that is ipo"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        mt_run_options options;
        char line[600];
        snprintf(line, sizeof line, RUN "%s %s", rows[i].both, rows[i].agrees);
        expect_good(&options, line);
        mt_options_free(&options);
        snprintf(line, sizeof line, RUN "%s %s", rows[i].both, rows[i].differs);
        expect_error(line, rows[i].words);
    }
    expect_error_of(MT_PROGRAM_TRAIN, 2,
                    RUN "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
                        "--num-layers-per-virtual-pipeline-stage 2 --global-batch-size 4",
                    "exclude each other unless they agree");
    mt_run_options options;
    expect_good(&options, RUN "--lr 1 --lr 0.5"); // one name that is given again
    assert_true(options.stack.lr == 0.5);
    mt_options_free(&options);
    expect_good(&options, RUN "--position-embedding-type rope --no-position-embedding"); // no learned one
    assert_int_equal(options.stack.position_embedding_type, MT_POSITION_ROPE);
    mt_options_free(&options);
#ifdef MT_HAVE_YAML
    char *folder = make_folder(), line[800];
    char *path = write_file(folder, "run.yaml",
                            "lr: 1e-3\nlearning_rate: 0.001\nmax_steps: 3\ntrain_iters: 3\nseed: 7\nseed: 7\n");
    snprintf(line, sizeof line, SHAPE "--mock-data --config %s --yaml-cfg=%s --seed 7", path, path);
    expect_good(&options, line);
    assert_true(options.stack.lr == 1e-3 && options.stack.train_iters == 3);
    mt_options_free(&options);
    remove_file(path);
    remove_folder(folder);
#endif
}

/* Also at its default an option without effect is named; one that is off, or has an effect, is not. */
static void options_at_their_default_without_effect_are_named(void **state) {
    (void)state;
    static const char *const idle[] = {
        "--moe-router-topk has no effect: it needs --num-experts\n",
        "--beta has no effect: it needs --stage dpo\n",
        "--moe-grouped-gemm has no effect: it needs --num-experts\n",
        "--fp8-margin has no effect: it needs --fp8-format\n",
        "--adam-beta1 has no effect: --optimizer is lion\n",
        "--sgd-momentum has no effect: it needs --optimizer sgd\n",
        "--pipeline-schedule has no effect: --pipeline-model-parallel-size is 1\n",
        "--ckpt-format has no effect: there is no --save\n",
        "--use-checkpoint-args has no effect: there is no --load\n",
        "--gpu has no effect: it is for --plan, --explain and --print-launch\n",
        "--gpus-per-host has no effect: it is for --plan, --explain and ",
        "--eval-interval-fraction has no effect: --eval-iters is 0\n",
        "--recompute-method has no effect: it needs --recompute-granularity full\n",
        "--dsa-indexer-ties has no effect: it needs --experimental-attention-variant dsa"};
    mt_run_options options;
    char *text;
    size_t size;
    expect_good(&options, RUN "--moe-router-topk 2 --beta 0.1 --moe-grouped-gemm --fp8-margin 0 --optimizer lion "
                              "--adam-beta1 0.9 --sgd-momentum 0.9 --swiglu false --seed 1234 --lion-beta1 0.9 "
                              "--micro-batch-size 1 --sequence-parallel false --pipeline-schedule 1f1b --gpu h200 "
                              "--ckpt-format huggingface --use-checkpoint-args --gpus-per-host 8 --eval-iters 0 "
                              "--eval-interval-fraction 0.5 --recompute-method default --dsa-indexer-ties torch");
    FILE *file = open_memstream(&text, &size);
    assert_non_null(file);
    mt_options_warn(&options, MT_PROGRAM_TRAIN, file);
    assert_int_equal(fclose(file), 0);
    int lines = 0;
    for (const char *at = text; (at = strstr(at, "has no effect")) != NULL; at++) lines++;
    for (size_t i = 0; i < sizeof idle / sizeof *idle; i++)
        if (!strstr(text, idle[i])) fail_msg("no line is \"%s\":\n%s", idle[i], text);
    assert_int_equal(lines, sizeof idle / sizeof *idle);
    free(text);
    mt_options_free(&options);
}

/* On the CPU, also where it was not asked for. */
static void options_for_a_gpu_are_named_on_the_cpu(void **state) {
    (void)state;
    static const char *const idle[] = {"--deterministic-mode has no effect: on the CPU",
                                       "--attention-backend flash has no effect: the CPU has one attention",
                                       "--optimizer-cpu-offload has no effect: on the CPU"};
    mt_run_options options;
    char *text;
    size_t size;
    expect_good(&options, RUN "--deterministic-mode --attention-backend flash --optimizer-cpu-offload");
    assert_int_equal(options.device, MT_DEVICE_AUTO);
    FILE *file = open_memstream(&text, &size);
    assert_non_null(file);
    mt_options_warn_cpu(&options, MT_PROGRAM_TRAIN, file);
    assert_int_equal(fclose(file), 0);
    for (size_t i = 0; i < sizeof idle / sizeof *idle; i++)
        if (!strstr(text, idle[i])) fail_msg("no line is \"%s\":\n%s", idle[i], text);
    free(text);
    mt_options_free(&options);
}

/* So do warnings. A second look changes nothing. */
static void warnings_have_the_names_that_were_given(void **state) {
    (void)state;
    mt_run_options options;
    mt_error error;
    char *text;
    size_t size;
    expect_good(&options,
                RUN "--num-moe-experts 4 --moe-ffn-hidden-size 8 --use-megatron-fsdp --fp8 hybrid "
                    "--dp-comm-overlap-bucket-size 1000 --use-flash-attn --moe-token-dispatcher-type allgather");
    FILE *file = open_memstream(&text, &size);
    assert_non_null(file);
    mt_options_warn(&options, MT_PROGRAM_TRAIN, file);
    assert_int_equal(fclose(file), 0);
    const char *const lines[] = {
        "--data-parallel-sharding-strategy (by --use-megatron-fsdp) has no effect: there is one",
        "\n--dp-comm-overlap-bucket-size has no effect"};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        if (!strstr(text, lines[i])) fail_msg("no line has %s:\n%s", lines[i], text);
    assert_null(strstr(text, "--ddp-bucket-size"));
    mt_error_set(&error, "--data-parallel-sharding-strategy, --num-experts, --num-experts-x and --fp8-format");
    for (int times = 0; times < 2; times++) {
        mt_options_name_typed(&options, &error);
        assert_string_equal(error.text,
                            "--data-parallel-sharding-strategy (by --use-megatron-fsdp), --num-moe-experts, "
                            "--num-experts-x and --fp8");
    }
    free(text);
    mt_options_free(&options);
}

/* The report of a run before it begins, on a backend with a GPU's properties. */
static void slow_attention_is_announced(void **state) {
    (void)state;
    static const struct {
        const char *line, *words; // NULL: none
    } cases[] = {{RUN, "\nAttention in fp32 takes plain kernels on a GPU, which are many times slower; add --bf16.\n"},
                 {RUN "--attention-dropout 0", "\nAttention in fp32 takes plain kernels on a GPU, which are many times "
                                               "slower; add --bf16.\n"},
                 {RUN "--bf16", NULL},
                 {RUN "--bf16 --attention-dropout 0", NULL}};
    mt_grid grid = {.world = {.size = 1}};
    mt_ops ops = mt_cpu_ops;
    ops.on_device = true;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_run_options options;
        char *text;
        size_t size;
        expect_good(&options, cases[i].line);
        FILE *file = open_memstream(&text, &size);
        assert_non_null(file);
        mt_report_opening(&options, &(mt_run_state){0}, &ops, &grid, NULL, file);
        assert_int_equal(fclose(file), 0);
        const char *found = strstr(text, cases[i].words ? cases[i].words : "plain kernels");
        if (!found != !cases[i].words) fail_msg("'%s' says:\n%s", cases[i].line, text);
        free(text), mt_options_free(&options);
    }
}

static void ranks_are_shared_out_and_what_is_left_is_data_parallel(void **state) {
    (void)state;
    mt_run_options options;
    mt_error error;
    const char *line = RUN "--tensor-model-parallel-size 2 --context-parallel-size 2 --sequence-parallel "
                           "--micro-batch-size 3";
    if (parse(&options, MT_PROGRAM_TRAIN, 12, line, &error)) fail_msg("%s", error.text);
    assert_int_equal(options.stack.data_parallel_size, 3);
    assert_int_equal(options.stack.global_batch_size, 9);
    assert_int_equal(options.stack.padded_vocab_size, 512); // a multiple of 128 for each of the two
    assert_int_equal(options.stack.distributed_timeout_seconds, 600);
    assert_int_equal(options.stack.save_timeout_seconds, 1800);
    mt_options_free(&options);
    expect_good(&options, RUN);
    assert_int_equal(options.stack.data_parallel_size, 1);
    mt_options_free(&options);
}

static void layouts_that_cannot_be_are_refused(void **state) {
    (void)state;
    expect_error_of(MT_PROGRAM_TRAIN, 6, RUN "--tensor-model-parallel-size 4",
                    "the number of ranks 6 must be a multiple of --tensor-model-parallel-size x "
                    "--pipeline-model-parallel-size x --context-parallel-size = 4; start others or lower a size");
    expect_error_of(MT_PROGRAM_TRAIN, 2,
                    RUN "--position-embedding-type rope --num-experts 4 --moe-aux-loss-coeff 1e-2 --mtp-num-layers 2 "
                        "--mtp-use-repeated-layer --moe-router-load-balancing-type global_aux_loss",
                    "global_aux_loss needs a data-parallel size of 1, not 2");
    expect_error_of(MT_PROGRAM_TRAIN, 2, RUN "--context-parallel-size 4",
                    "the number of ranks 2 must be a multiple of");
    expect_error_of(MT_PROGRAM_TRAIN, 3, RUN "--tensor-model-parallel-size 3",
                    "--num-attention-heads 4 must be a multiple of --tensor-model-parallel-size 3");
    expect_error_of(MT_PROGRAM_TRAIN, 2,
                    RUN "--num-attention-heads 6 --kv-channels 8 --group-query-attention --num-query-groups 3 "
                        "--tensor-model-parallel-size 2",
                    "--num-query-groups 3 must be a multiple or a divisor of --tensor-model-parallel-size 2");
    expect_error_of(MT_PROGRAM_TRAIN, 2, RUN "--tensor-model-parallel-size 2 --ffn-hidden-size 63",
                    "--ffn-hidden-size 63 must be a multiple of --tensor-model-parallel-size 2");
    expect_error_of(MT_PROGRAM_TRAIN, 2, RUN "--tensor-model-parallel-size 2 --tp-comm-overlap",
                    "--tp-comm-overlap needs --sequence-parallel");
    expect_error_of(MT_PROGRAM_TRAIN, 4,
                    RUN "--tensor-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 12",
                    "--global-batch-size 12 must be a multiple of --micro-batch-size x the data-parallel size = 8; "
                    "try 8 or 16");
    expect_error(RUN "--distributed-timeout-seconds 0", "--distributed-timeout-seconds must be in");
}

static void batches_and_lengths_that_cannot_be_are_refused(void **state) {
    (void)state;
    expect_error_of(MT_PROGRAM_TRAIN, 3, RUN "--micro-batch-size 4 --global-batch-size 32",
                    "--global-batch-size 32 must be a multiple of --micro-batch-size x the data-parallel size = 12; "
                    "try 24 or 36");
    expect_error(SHAPE "--mock-data --lr 1", "--train-iters and --train-samples");
    expect_error(RUN "--train-samples 100", "--train-iters and --train-samples exclude each other");
    expect_error(SHAPE "--mock-data --lr 1 --train-samples 3 --global-batch-size 4", "less than one");
    expect_error(RUN "--rampup-batch-size 1 1 5", "--rampup-batch-size needs --train-samples");
    expect_error(SHAPE "--mock-data --lr 1 --train-samples 100 --global-batch-size 8 --rampup-batch-size 2 2",
                 "--rampup-batch-size expects three numbers");
    expect_error(SHAPE "--mock-data --lr 1 --train-samples 100 --global-batch-size 8 --rampup-batch-size 2 4 50",
                 "start = 6 must be a multiple of --rampup-batch-size's increment 4");
    expect_error(RUN "--seq-length 0", "--seq-length must be in");
    expect_error(
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --vocab-size 8 --mock-data --train-iters 1 --lr 1",
        "--seq-length is missing");
}

static void context_parallelism_that_cannot_be_is_refused(void **state) {
    (void)state;
#define OVER_FOUR RUN "--context-parallel-size 4 "
    const char *sizes = "two numbers whose product is --context-parallel-size 4";
    expect_error_of(MT_PROGRAM_TRAIN, 4, OVER_FOUR "--cp-comm-type ring",
                    "--cp-comm-type expects p2p|all_gather|a2a|a2a+p2p, got 'ring'");
    expect_error_of(MT_PROGRAM_TRAIN, 4, OVER_FOUR "--cp-comm-type a2a+p2p", sizes);
    expect_error_of(MT_PROGRAM_TRAIN, 4, OVER_FOUR "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4",
                    sizes);
    expect_error_of(MT_PROGRAM_TRAIN, 4, OVER_FOUR "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4",
                    sizes);
    expect_error_of(MT_PROGRAM_TRAIN, 4, OVER_FOUR "--hierarchical-context-parallel-sizes 2 2",
                    "--hierarchical-context-parallel-sizes needs --cp-comm-type a2a+p2p, not p2p");
    expect_error_of(MT_PROGRAM_TRAIN, 4, OVER_FOUR "--cp-comm-type a2a --group-query-attention --num-query-groups 2",
                    "--num-query-groups / --tensor-model-parallel-size = 2 must be a multiple of the ranks over which "
                    "--cp-comm-type a2a splits them, 4; take p2p or all_gather");
    expect_error_of(
        MT_PROGRAM_TRAIN, 8, OVER_FOUR "--cp-comm-type a2a --tensor-model-parallel-size 2",
        "--num-attention-heads / --tensor-model-parallel-size = 2 must be a multiple of the ranks over which");
    expect_error_of(MT_PROGRAM_TRAIN, 4, OVER_FOUR "--window-size 5 --cp-comm-type p2p", "take all_gather or a2a");
    expect_error_of(MT_PROGRAM_TRAIN, 4,
                    OVER_FOUR "--window-size 5 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
                    "--window-size 5 does not work with --cp-comm-type a2a+p2p");
    static const struct {
        const char *line;
        int64_t a2a;
    } good[] = {{OVER_FOUR, 1},
                {OVER_FOUR "--cp-comm-type all_gather --window-size 5", 1},
                {OVER_FOUR "--window-size 5", 1}, // all_gather is the default with a window
                {OVER_FOUR "--cp-comm-type a2a --window-size 5", 4},
                {OVER_FOUR "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", 2},
                {RUN "--cp-comm-type a2a", 1}}; // one context rank: as in Megatron, the type says nothing
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        mt_run_options options;
        mt_error error;
        if (parse(&options, MT_PROGRAM_TRAIN, 4, good[i].line, &error)) fail_msg("%s", error.text);
        assert_int_equal(options.stack.context_a2a_size, good[i].a2a);
        mt_options_free(&options);
    }
#undef OVER_FOUR
}

static void schedules_that_cannot_be_are_refused(void **state) {
    (void)state;
    expect_error(SHAPE "--mock-data --train-iters 10", "--lr is missing");
    expect_error(RUN "--min-lr 1", "--min-lr 1 must be at most --lr 0.001");
    expect_error(RUN "--lr-warmup-iters 10", "--lr-warmup-iters 10 must be less than --lr-decay-iters 10 (default");
    expect_error(RUN "--lr-warmup-iters 2 --lr-warmup-fraction 0.1", "exclude each other");
    expect_error(RUN "--lr-warmup-samples 2", "--lr-warmup-samples needs --train-samples");
    expect_error(RUN "--lr-decay-style WSD", "WSD needs --lr-wsd-decay-iters");
    expect_error(RUN "--lr-wsd-decay-iters 3", "needs --lr-decay-style WSD, not linear");
    expect_error(RUN "--start-weight-decay 0.1", "need --weight-decay-incr-style");
    expect_error(RUN "--weight-decay-incr-style linear", "need --start-weight-decay and --end-weight-decay");
    expect_error(RUN "--weight-decay-incr-style linear --start-weight-decay 0.2 --end-weight-decay 0.1",
                 "the first at most the second");
}

static void data_and_checkpoints_that_conflict_are_refused(void **state) {
    (void)state;
    expect_error(SHAPE "--train-iters 1 --lr 1", "give one source of data");
    expect_error(RUN "--data-path a", "--data-path and --mock-data exclude each other");
    expect_error(SHAPE "--train-iters 1 --lr 1 --tokens-file t --reset-position-ids",
                 "--tokens-file and --reset-position-ids exclude each other");
    expect_error(SHAPE "--train-iters 10 --lr 1e-3 --train-data-path x --split 1,1,1", "--split needs --data-path");
    expect_error(SHAPE "--train-iters 1 --lr 1 --data-path a --eod-mask-loss",
                 "--eod-mask-loss needs --tokenizer-type");
    expect_error(RUN "--valid-data-path a", "--valid-data-path needs --train-data-path");
    expect_error(RUN "--tokenizer-model t", "--tokenizer-model needs --tokenizer-type");
    expect_error(RUN "--tokenizer-type ByteLevel --tokenizer-model t",
                 "needs --tokenizer-type HuggingFaceTokenizer|SentencePieceTokenizer|GPT2BPETokenizer|TikTokenizer, "
                 "not ByteLevel");
    expect_error(RUN "--finetune", "--finetune needs --load");
    expect_error(RUN "--load x --save x --overwrite", "--load x continues the run that --overwrite would replace");
    expect_error(RUN "--save x --auto-resume --overwrite", "--overwrite and --auto-resume exclude each other");
    expect_error(RUN "--load /nowhere", "/nowhere: No such file or directory");
    expect_error(RUN "--hf-config /tmp", "/tmp: cannot be read: it is a folder");
    expect_error(RUN "--config /nowhere.yaml", "/nowhere.yaml: cannot be read");
}

/* The option's own name stands in messages if it was given last. */
static void messages_have_the_names_that_were_given(void **state) {
    (void)state;
    expect_error(RUN "--layernorm-epsilon 5", "--layernorm-epsilon must be in (0,1)");
    expect_error(RUN "--norm-epsilon 5 --layernorm-epsilon 5", "--layernorm-epsilon must be in (0,1)");
    expect_error(RUN "--layernorm-epsilon 5 --norm-epsilon 5", "--norm-epsilon must be in (0,1)");
    expect_error(RUN "--num-moe-experts 4 --moe-router-topk 5", "must be at most --num-moe-experts 4");
    expect_error(RUN "--virtual-pipeline-model-parallel-size 2",
                 "--virtual-pipeline-model-parallel-size needs --pipeline-model-parallel-size");
    expect_error(RUN "--dp-comm-overlap-bucket-size -1", "--dp-comm-overlap-bucket-size must be in");
    expect_error(RUN "--num-layers-in-first-pipeline-stage 1", "--num-layers-in-first-pipeline-stage needs");
    // another form of an option
    expect_error(RUN "--add-bias-linear=False --disable-bias-linear=maybe", "--disable-bias-linear expects true or");
    expect_error(RUN "--no-position-embedding --rotary-percent 0.5",
                 "needs --position-embedding-type (by --no-position-embedding) rope, not none");
    expect_error(RUN "--use-flash-attn false --attention-backend cudnn", "--attention-backend cudnn needs --bf16");
    expect_error(RUN "--use-megatron-fsdp --pipeline-schedule zb-h1 --pipeline-model-parallel-size 2",
                 "--data-parallel-sharding-strategy (by --use-megatron-fsdp) ");
#ifdef MT_HAVE_YAML
    char *folder = make_folder(), line[300];
    char *path = write_file(folder, "run.yaml", "lr: 1\nlayernorm_epsilon: 5\n");
    snprintf(line, sizeof line, RUN "--config %s", path);
    expect_error(line, "run.yaml:2: layernorm_epsilon must be in (0,1)");
    remove_file(path);
    remove_folder(folder);
#endif
}

static void strategies_of_data_parallelism_are_checked(void **state) {
    (void)state;
    const struct {
        const char *words;
        mt_strategy strategy;
    } good[] = {{"", MT_NO_SHARD},
                {"--overlap-grad-reduce", MT_NO_SHARD},
                {"--use-distributed-optimizer", MT_SHARD_OPTIM},
                {"--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", MT_SHARD_OPTIM},
                {"--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads", MT_SHARD_GRADS},
                {"--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce --overlap-param-gather",
                 MT_SHARD_PARAMS}};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        char line[512];
        mt_run_options options;
        mt_error error;
        snprintf(line, sizeof line, RUN "%s", good[i].words);
        expect_good(&options, line);
        assert_int_equal(options.stack.data_parallel_sharding_strategy, good[i].strategy);
        assert_int_equal(mt_options_finish(&options, MT_PROGRAM_TRAIN, 4, &error), -1); // global batch of one rank
        options.stack.global_batch_size = 0;
        assert_int_equal(mt_options_finish(&options, MT_PROGRAM_TRAIN, 4, &error), 0); // once more
        assert_int_equal(options.stack.data_parallel_sharding_strategy, good[i].strategy);
        mt_options_free(&options);
    }
    expect_error(RUN "--use-distributed-optimizer --data-parallel-sharding-strategy no_shard",
                 "--use-distributed-optimizer and --data-parallel-sharding-strategy no_shard exclude each other");
    expect_error(RUN "--overlap-grad-reduce --overlap-param-gather",
                 "--overlap-param-gather needs --data-parallel-sharding-strategy optim|optim_grads|optim_grads_params, "
                 "not no_shard");
    expect_error(RUN "--use-distributed-optimizer --overlap-param-gather",
                 "--overlap-param-gather needs --overlap-grad-reduce");
    expect_error(RUN "--data-parallel-sharding-strategy zero", "no_shard|optim|optim_grads|optim_grads_params");
}

/* A backward in two parts goes with the strategies that keep gradients whole. */
static void a_split_backward_needs_whole_gradients(void **state) {
    (void)state;
    const char *strategies[] = {"no_shard", "optim", "optim_grads", "optim_grads_params"};
    for (int i = 0; i < 4; i++) {
        mt_run_options options;
        mt_error error;
        char line[512];
        snprintf(line, sizeof line,
                 RUN "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --data-parallel-sharding-strategy %s",
                 strategies[i]);
        if (i >= 2)
            expect_error_of(MT_PROGRAM_TRAIN, 4, line,
                            "zb-h1 needs --data-parallel-sharding-strategy no_shard|optim, not optim_grads");
        else if (parse(&options, MT_PROGRAM_TRAIN, 4, line, &error) != 0)
            fail_msg("%s", error.text);
        else
            mt_options_free(&options);
    }
}

/* A model for cuDNN's attention. */
#define FOR_CUDNN RUN "--attention-backend cudnn --bf16 --attention-dropout 0 --seq-length 256 "

static void attention_backends_that_cannot_serve_are_refused(void **state) {
    (void)state;
    const char *good[] = {RUN "--attention-backend flash --device cpu", RUN "--attention-backend unfused",
                          RUN "--attention-backend auto --deterministic-mode"};
    mt_run_options options;
    mt_options_default(&options);
    assert_int_equal(options.stack.attention_backend, MT_ATTENTION_AUTO);
    mt_options_free(&options);
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        expect_good(&options, good[i]);
        mt_options_free(&options);
    }
    expect_error(RUN "--attention-backend fast", "--attention-backend expects auto|flash|cudnn|unfused, got 'fast'");
    expect_error(FOR_CUDNN "--bf16=false", "--attention-backend cudnn needs --bf16");
    expect_error(FOR_CUDNN "--attention-dropout 0.25", "cudnn needs --attention-dropout 0, not 0.25");
    expect_error(FOR_CUDNN "--deterministic-mode",
                 "--attention-backend cudnn and --deterministic-mode exclude each other");
    expect_error(FOR_CUDNN "--rerun-mode validate_results",
                 "--attention-backend cudnn and --rerun-mode validate_results exclude each other");
    expect_error(FOR_CUDNN "--window-size 64", "cudnn and --window-size exclude each other");
}

static void infer_is_checked_too(void **state) {
    (void)state;
    const char *load = "--load tests/golden/hf/llama ";
    char line[300];
    const char *const cases[][2] = {
        {"--prompt a --prompt-tokens 1", "--prompt and --prompt-tokens exclude each other"},
        {"--score s --seq-length 8", "--score needs --out, --entropy-out or --logits-out"},
        {"--score s --out o", "--seq-length is missing: --score needs it"},
        {"--out o", "--out needs --score"},
        {"--max-sequences 3", "--max-sequences needs --score"},
        {"--micro-batch-size 3", "--micro-batch-size needs --score"},
        {"--seq-length 3", "--seq-length needs --score"},
        {"--score s --out o --seq-length 8 --top-k 3", "--score and --top-k exclude each other"},
        {"--top-p 0", "--top-p must be in (0,1]"},
        {"--top-p 1.5", "--top-p must be in (0,1]"},
        {"--temperature -1", "--temperature must be in"},
        {"--prompt-tokens 1,x", "--prompt-tokens expects numbers"},
        {"--prompt-tokens 1,,2", "--prompt-tokens expects numbers"},
        {"--prompt-tokens 1,160", "160 is outside the vocabulary of 160"},
        {"--prompt-tokens 99999999999999999999", "99999999999999999999 is outside the vocabulary"},
        {"--prompt-tokens 1,", "ends with a comma"},
        {"--tokenizer-type GPT2BPETokenizer", "--tokenizer-type GPT2BPETokenizer needs --tokenizer-model"},
        {"--lr 3", "--lr is an option of train, not of infer"},
    };
    expect_error_of(MT_PROGRAM_INFER, 1, "--prompt a", "--load is missing");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        snprintf(line, sizeof line, "%s%s", load, cases[i][0]);
        expect_error_of(MT_PROGRAM_INFER, 1, line, cases[i][1]);
    }
    mt_run_options options;
    mt_error error;
    snprintf(line, sizeof line, "%s--prompt-tokens 1,2,159 --temperature 0", load);
    if (parse(&options, MT_PROGRAM_INFER, 1, line, &error)) fail_msg("%s", error.text);
    assert_int_equal(options.stack.seq_length, 64);
    assert_int_equal(options.stack.hf_family, MT_HF_LLAMA);
    mt_options_free(&options);
}

/* ---- printing */

static char *read_stream(FILE *file) {
    char *text = mt_calloc(1 << 16);
    rewind(file);
    assert_true(fread(text, 1, (1 << 16) - 1, file) > 0);
    fclose(file);
    return text;
}

/* The output of `--help WORD`, from a child process because it exits. */
static char *help_of(mt_program program, char *word) {
    FILE *file = tmpfile();
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        char *words[] = {"program", "--help", word};
        mt_run_options options;
        mt_error error;
        dup2(fileno(file), 1);
        mt_options_parse(&options, program, word ? 3 : 2, words, &error);
        _exit(3); // --help returned
    }
    int status = -1;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    return read_stream(file);
}

/* ---- names of Megatron-LM */

/* The next name of the list, without dashes; NULL at its end. */
static char *next_megatron_name(FILE *list, char line[1000]) {
    while (fgets(line, 1000, list)) {
        if (strncmp(line, "--", 2) != 0) continue;
        line[strcspn(line, "\t\n")] = 0;
        return line + 2;
    }
    return NULL;
}

/* Megatron-LM's arguments and fields of August 2026, and the parser of Megatron-Core 0.19.2 with all its spellings. */
static const char *const megatron_lists[] = {"tests/megatron-arguments.tsv", "tests/megatron-core-arguments.tsv"};

/* Every name is an option, another spelling of one, a note, or refused with the reason. */
static void expect_one_answer_each(const char *path, int names, int least_accepted) {
    static const char *const answers[] = {"is named", "has no meaning here", "is not supported"};
    FILE *list = fopen(path, "r");
    assert_non_null(list);
    char line[1000], option[200];
    int count = 0, accepted = 0;
    for (char *name; (name = next_megatron_name(list, line)); count++) {
        bool is_row = mt_option_find(name, strlen(name)) != NULL, is_refused = false;
        mt_megatron_name megatron = mt_megatron_name_find(name, strlen(name));
        if (is_row == (megatron.kind != MT_NAME_UNKNOWN))
            fail_msg("--%s: %s", name,
                     is_row ? "is an option; remove it from data/options/megatron_names.c"
                            : "has no answer in data/options/megatron_names.c");
        if (megatron.kind == MT_NAME_ALIAS) assert_non_null(mt_option_find(megatron.text, strlen(megatron.text)));
        for (const char *at = megatron.text; at && (at = strstr(at, "--")); at += 2) { // options that an answer names
            size_t length = strspn(at + 2, "abcdefghijklmnopqrstuvwxyz0123456789-");
            if (!mt_option_find(at + 2, length)) fail_msg("--%s: %s", name, megatron.text);
        }
        mt_run_options options;
        mt_error error = {""};
        snprintf(option, sizeof option, "--%s", name);
        if (parse(&options, MT_PROGRAM_TRAIN, 1, option, &error) == 0) fail_msg("%s alone was accepted", option);
        for (size_t i = 0; i < sizeof answers / sizeof *answers; i++) is_refused |= !!strstr(error.text, answers[i]);
        if (strstr(error.text, "unknown")) fail_msg("%s: %s", option, error.text);
        bool has_value = megatron.kind != MT_NAME_IDLE || !megatron.value; // else some values alone have no effect
        if (is_refused == (is_row || (megatron.kind <= MT_NAME_IDLE && has_value)))
            fail_msg("%s: %s", option, error.text);
        accepted += !is_refused;
        mt_options_free(&options);
    }
    fclose(list);
    assert_int_equal(count, names);
    assert_true(accepted > least_accepted);
}

static void every_name_of_megatron_has_one_answer(void **state) {
    (void)state;
    expect_one_answer_each(megatron_lists[0], 970, 190);
    expect_one_answer_each(megatron_lists[1], 847, 190);
}

/* Compares what mt_options_set and the command line answer to --NAME=VALUE. */
static void expect_one_answer(const char *name, const char *value) {
    mt_run_options line, set;
    mt_error first = {""}, second = {""};
    char argument[300], *words[] = {"program", argument};
    snprintf(argument, sizeof argument, "--%s=%s", name, value);
    fflush(stdout);
    int output = dup(STDOUT_FILENO), nothing = open("/dev/null", O_WRONLY);
    dup2(nothing, STDOUT_FILENO); // "always so here"
    int read = mt_options_parse(&line, MT_PROGRAM_LIBRARY, 2, words, &first);
    fflush(stdout);
    dup2(output, STDOUT_FILENO);
    close(output), close(nothing);
    mt_options_default(&set);
    int status = mt_options_set(&set, name, value, &second);
    if (status == 0) status = mt_options_read_shape(&set, &second);
    if (read != status || strcmp(first.text, second.text) != 0)
        fail_msg("%s: the command line: %s; mt_options_set: %s", argument, read ? first.text : "accepted",
                 status ? second.text : "accepted");
    for (const mt_option *row = mt_option_table; row->help && status == 0; row++) {
        if (!row->name) continue;
        char *a = mt_option_text(&line, row), *b = mt_option_text(&set, row);
        if (strcmp(a, b) != 0) fail_msg("%s: --%s is '%s' and '%s'", argument, row->name, a, b);
        free(a), free(b);
    }
    mt_options_free(&line);
    mt_options_free(&set);
}

/* Every option, and every name of Megatron-LM. --config FILE is for command lines alone. */
static void set_by_name_and_the_command_line_give_one_answer(void **state) {
    (void)state;
    static const char *const values[] = {"true", "False", "1",     "-1",           "0.5",      "none", "fp32",
                                         "adam", "vp",    "optim", "fsdp_dtensor", "no_shard", "x",    ""};
    char line[1000];
    FILE *list = fopen("tests/megatron-arguments.tsv", "r");
    assert_non_null(list);
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        rewind(list);
        for (char *name; (name = next_megatron_name(list, line));)
            if (strcmp(name, "yaml-cfg") != 0) expect_one_answer(name, values[i]);
        for (const mt_option *row = mt_option_table; row->help; row++)
            if (row->name && strcmp(row->name, "config") != 0) expect_one_answer(row->name, values[i]);
        expect_one_answer("num_moe_experts", values[i]);
    }
    fclose(list);
}

/* To switch off a default of Megatron-LM that this program has changes numbers, and so do sums in fp32 beside bf16. */
static void names_that_would_change_numbers_are_no_notes(void **state) {
    (void)state;
    static const char *const sums[] = {"ddp-reduce-scatter-with-fp32-accumulation",
                                       "reduce-scatter-with-fp32-accumulation",
                                       "ddp-param-name-patterns-for-fp32-local-accumulation=all"};
    mt_run_options options;
    char words[300];
    expect_error(RUN "--no-dsa-indexer-scoring-relu", "--no-dsa-indexer-scoring-relu is not supported");
    expect_error(RUN "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces", "is not supported (blanks are as");
    expect_good(&options, RUN "--dsa-indexer-scoring-relu --disable-dsa-indexer-rotate-activation "
                              "--no-inference-wandb-logging --tokenizer-sentencepiece-ignore-extra-whitespaces");
    mt_options_free(&options);
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++) {
        snprintf(words, sizeof words, RUN "--%s", sums[i]);
        expect_good(&options, words);
        mt_options_free(&options);
        snprintf(words, sizeof words, RUN "--bf16 --%s --grad-reduce-in-bf16", sums[i]);
        expect_error(words, "sums of some gradients or ranks in fp32 are not supported beside sums in bf16");
        snprintf(words, sizeof words, RUN "--bf16 --%s --use-precision-aware-optimizer --main-grads-dtype bf16",
                 sums[i]);
        expect_error(words, "beside sums in another type; leave it out, or --main-grads-dtype");
    }
}

/* A file is for command lines, and so are names without effect: a program has no line to print them on. */
static void a_program_sets_no_file_and_no_name_without_effect(void **state) {
    (void)state;
    mt_run_options o;
    mt_error error;
    mt_options_default(&o);
    assert_int_equal(mt_options_set(&o, "config", "run.yaml", &error), -1);
    assert_non_null(strstr(error.text, "--config is for a command line; read the file by mt_options_read_yaml"));
    assert_int_equal(mt_options_set(&o, "use-mcore-models", "true", &error), -1);
    assert_non_null(strstr(error.text, "--use-mcore-models has no meaning here"));
    mt_options_free(&o);
}

/* --no-X and --disable-X are forms of Megatron's X and add-X. */
static bool megatron_has(const char *name) {
    char line[1000], added[120];
    const char *bare = strncmp(name, "no-", 3) == 0 ? name + 3 : strncmp(name, "disable-", 8) == 0 ? name + 8 : name;
    snprintf(added, sizeof added, "add-%s", bare);
    bool has = false;
    for (size_t i = 0; i < sizeof megatron_lists / sizeof *megatron_lists; i++) {
        FILE *list = fopen(megatron_lists[i], "r");
        assert_non_null(list);
        for (char *other; !has && (other = next_megatron_name(list, line));)
            has = strcmp(other, name) == 0 || strcmp(other, bare) == 0 || strcmp(other, added) == 0;
        fclose(list);
    }
    return has;
}

static void options_that_megatron_lacks_are_marked(void **state) {
    (void)state;
    for (const mt_option *row = mt_option_table; row->help; row++)
        if (row->name && row->own == megatron_has(row->name))
            fail_msg("--%s: .own must be %s", row->name, row->own ? "left out" : "true");
}

/* Names of features that have other names here. */
static void answers_name_the_option_to_use(void **state) {
    (void)state;
    expect_error(RUN "--grpo-group-size 8", "--grpo-group-size is named --num-return-sequences here");
    expect_error(RUN "--perform-rl-step", "--perform-rl-step is not supported (--stage rl is reinforcement learning");
    expect_error(RUN "--rl-inference-tensor-model-parallel-size 2", "is named --rollout-tensor-model-parallel-size");
    expect_error(RUN "--logits-load-dir d", "is named --teacher-load, with --stage kd");
    expect_error(RUN "--sft-tokenizer-prompt-format x", "is named --chat-template here");
    expect_error(RUN "--tokenizer-type NullMultimodalTokenizer", "models of images and text are not supported");
    expect_error(RUN "--tokenizer-type BertWordPieceCase", "it is not read");
    expect_error(RUN "--dataloader-type external", "a training script's own loader");
    expect_error(RUN "--fn a b", "; leave it out");
    expect_error(RUN "--cpu-offload-optimizer", "did you mean --optimizer-cpu-offload?");
    expect_error(RUN "--offload-optimizer", "is named --optimizer-cpu-offload here");
    static const char *const usual[][2] = {{"epochs", "train-epochs"},
                                           {"num-epochs", "train-epochs"},
                                           {"max-seq-len", "seq-length"},
                                           {"context-length", "seq-length"},
                                           {"num-heads", "num-attention-heads"},
                                           {"tp-size", "tensor-model-parallel-size"},
                                           {"pp", "pipeline-model-parallel-size"},
                                           {"grad-accum", "gradient-accumulation-steps"},
                                           {"train-file", "data-path"},
                                           {"n-predict", "max-new-tokens"},
                                           {"temp", "temperature"},
                                           {"vocab", "vocab-size"}};
    for (size_t i = 0; i < sizeof usual / sizeof *usual; i++) {
        char words[200], answer[200];
        snprintf(words, sizeof words, RUN "--%s 3", usual[i][0]);
        snprintf(answer, sizeof answer, "--%s is named --%s here", usual[i][0], usual[i][1]);
        expect_error(words, answer);
    }
    // the opposite of a flag has an answer too
    expect_error(RUN "--expert-parallel-size 2", "did you mean --expert-model-parallel-size?");
    expect_error(RUN "--clip-grad-norm 1", "did you mean --clip-grad?");
    expect_error(RUN "--cpu-offload", "did you mean --optimizer-cpu-offload?");
    expect_error(RUN "--untie-embeddings", "did you mean --untie-embeddings-and-output-weights?");
    expect_error(RUN "--no-such-flag", "unknown option --no-such-flag");
    expect_error(RUN "--cpu-offloading", "--fine-grained-activation-offloading keeps the activations");
    expect_error(RUN "--output-logit-dtype bf16", "not supported (other types of logits and of the loss)");
    expect_error(RUN "--moe-shared-expert-overlap=false", "can only be true here: a shared expert runs during");
}

static void all_refused_names_are_reported_at_once(void **state) {
    (void)state;
    mt_run_options options;
    mt_error error;
    const char *line = "--fp16-lm-cross-entropy --enable-autocast --fn a b --d-model 3 --numlayers 3 4 --foo --lr 1";
    assert_int_equal(parse(&options, MT_PROGRAM_TRAIN, 1, line, &error), -1);
    assert_string_equal(error.text, "6 options cannot be used:\n"
                                    "  is not supported (other types of logits and of the loss): "
                                    "--fp16-lm-cross-entropy, --enable-autocast\n"
                                    "  has no meaning here (it is a Python function, or a part of one of Megatron's "
                                    "configuration classes); leave out: --fn\n"
                                    "  is named --hidden-size here: --d-model\n"
                                    "  is unknown: --numlayers (did you mean --num-layers?), --foo");
    mt_options_free(&options);
    char many[6000] = "";
    for (int i = 0; i < 110; i++) sprintf(many + strlen(many), "--no-such-option-at-all-with-a-long-name-%d ", i);
    assert_int_equal(parse(&options, MT_PROGRAM_TRAIN, 1, many, &error), -1);
    assert_true(strlen(error.text) < sizeof error.text);
    assert_string_equal(error.text + strlen(error.text) - 4, " ...");
    mt_options_free(&options);
}

static void other_names_of_an_option_set_it(void **state) {
    (void)state;
    mt_run_options options;
    expect_good(&options, RUN "--use-rotary-position-embeddings --num-query-groups 2 --use-megatron-fsdp "
                              "--enable-straggler-detection --add-bias-linear=False --num_moe_experts=2 --swiglu "
                              "--use-flash-attn --no-gradient-accumulation-fusion --init-model-with-meta-device");
    assert_int_equal(options.stack.position_embedding_type, MT_POSITION_ROPE);
    assert_int_equal(options.stack.num_query_groups, 2);
    assert_int_equal(options.stack.data_parallel_sharding_strategy, MT_SHARD_PARAMS);
    assert_int_equal(options.stack.attention_backend, MT_ATTENTION_FLASH);
    assert_int_equal(options.stack.num_experts, 2);
    assert_true(options.log_straggler && !options.add_bias_linear);
    mt_options_free(&options);
    expect_good(&options, RUN "--data-parallel-sharding-strategy optim --use-megatron-fsdp --num-query-groups 0");
    assert_int_equal(options.stack.data_parallel_sharding_strategy, MT_SHARD_OPTIM);
    assert_int_equal(options.stack.num_query_groups, 4);
    mt_options_free(&options);
    expect_good(&options, RUN "--use-rotary-position-embeddings --no-position-embedding"); // as scripts have them
    assert_int_equal(options.stack.position_embedding_type, MT_POSITION_ROPE);
    mt_options_free(&options);
    expect_good(&options, RUN "--use-megatron-fsdp --use-torch-fsdp2"); // two names of one value
    mt_options_free(&options);
    expect_error(RUN "--use-layer-wise-distributed-optimizer --use-megatron-fsdp",
                 "--use-megatron-fsdp and --use-layer-wise-distributed-optimizer exclude each other: they ask for two "
                 "values of one option; leave one out");
    expect_error(RUN "--use-torch-fsdp2 --use-layer-wise-distributed-optimizer",
                 "--use-layer-wise-distributed-optimizer and --use-torch-fsdp2 exclude each other");
    expect_good(&options, RUN "--group-query-attention --num-query-groups 0 --use-flash-attn=false");
    assert_int_equal(options.stack.num_query_groups, 4);
    assert_int_equal(options.stack.attention_backend, MT_ATTENTION_AUTO);
    mt_options_free(&options);
    mt_error error;
    assert_int_equal(parse(&options, MT_PROGRAM_TRAIN, 2,
                           RUN "--pipeline-model-parallel-size 2 --num-layers 4 --global-batch-size 4 "
                               "--virtual-pipeline-model-parallel-size 2",
                           &error),
                     0);
    assert_int_equal(options.stack.num_virtual_stages_per_pipeline_rank, 2);
    mt_options_free(&options);
}

static void names_that_state_what_is_so_take_no_other_value(void **state) {
    (void)state;
    mt_run_options options;
    expect_good(&options, RUN "--attention-softmax-in-fp32 --accumulate-allreduce-grads-in-fp32 --softmax-type vanilla "
                              "--calculate-per-token-loss --no-gradient-accumulation-fusion --no-save-rng "
                              "--grad-reduce-in-fp32=True --fp16=False --main-params-dtype fp32");
    mt_options_free(&options);
    expect_error(RUN "--attention-softmax-in-fp32=false", "can only be true here: softmax is computed in fp32");
    expect_error(RUN "--bf16 --accumulate-allreduce-grads-in-fp32 --grad-reduce-in-bf16", "two names of one option");
    expect_good(&options, RUN "--bf16 --accumulate-allreduce-grads-in-fp32 false"); // as Megatron-LM's bf16 runs
    assert_int_equal(options.stack.main_grads_dtype, MT_OPTIMIZER_FP32);
    mt_options_free(&options);
    expect_error(RUN "--calculate-per-token-loss=false", "can only be true here: the loss is the sum over the tokens");
    expect_good(&options, RUN "--ckpt-format fsdp_dtensor --use-megatron-fsdp --dist-ckpt-format=fsdp_dtensor");
    assert_int_equal(options.stack.data_parallel_sharding_strategy, MT_SHARD_PARAMS);
    mt_options_free(&options);
    assert_int_equal(options.ckpt_format, MT_CHECKPOINT_HF);
    expect_error(RUN "--ckpt-format fsdp_dtensor", "--ckpt-format fsdp_dtensor is the format of --use-megatron-fsdp");
    expect_good(&options, RUN "--use-megatron-fsdp --dist-ckpt-format torch_dist");
    assert_int_equal(options.ckpt_format, MT_CHECKPOINT_TORCH_DIST);
    mt_options_free(&options);
    expect_good(&options, RUN "--ckpt-format torch");
    assert_int_equal(options.ckpt_format, MT_CHECKPOINT_TORCH); // a note says that it is read only
    mt_options_free(&options);
    expect_error(RUN "--ckpt-format zarr", "huggingface|torch_dist|torch|fsdp_dtensor");
    expect_good(&options, RUN "--spec megatron.core.models.hybrid.hybrid_layer_specs x");
    mt_options_free(&options);
    expect_error(RUN "--step-batch-size-schedule 0:2", "--step-batch-size-schedule needs --train-samples");
    expect_error(RUN "--spec local", "--spec is not supported with this value (only megatron.core.models.hybrid");
    expect_error(RUN "--softmax-type banana", "banana");
    expect_good(&options, RUN "--moe-shared-expert-overlap --perform-rl-step=False");
    mt_options_free(&options);
    expect_error(RUN "--attention-softmax-in-fp32=1", "expects true or false, got '1'");
    expect_error(RUN "--softmax-type", "--softmax-type expects");
}

static void a_blend_may_be_one_text(void **state) {
    (void)state;
    char *words[] = {"program", "--train-data-path", "0.7 a_text_document 0.3 b_text_document", "--valid-data-path",
                     "my data"};
    mt_run_options options;
    mt_error error;
    assert_int_equal(mt_options_parse(&options, MT_PROGRAM_TRAIN, 5, words, &error), 0);
    assert_int_equal(options.train_data_path.count, 4);
    assert_string_equal(options.train_data_path.items[0], "0.7");
    assert_string_equal(options.train_data_path.items[3], "b_text_document");
    assert_int_equal(options.valid_data_path.count, 1);
    mt_options_free(&options);
    words[2] = "0.7\ta_text_document\n0.3 b_text_document\n"; // as several lines of YAML give it
    assert_int_equal(mt_options_parse(&options, MT_PROGRAM_TRAIN, 5, words, &error), 0);
    assert_int_equal(options.train_data_path.count, 4);
    assert_string_equal(options.train_data_path.items[3], "b_text_document");
    mt_options_free(&options);
}

static void help_shows_the_programs_own_options_within_100_columns(void **state) {
    (void)state;
    char *train = help_of(MT_PROGRAM_TRAIN, NULL), *infer = help_of(MT_PROGRAM_INFER, NULL);
    char *common = strstr(train, "what most people need\n"), *model = strstr(train, "\nmodel\n");
    assert_true(common && model && strstr(common, "  --lr N") < model && strstr(common, "* --config FILE") < model);
    assert_non_null(strstr(train, "--untie-embeddings-and-output-weights"));
    assert_non_null(strstr(train, "(default: 0.999)"));
    assert_null(strstr(train, "--prompt-tokens"));
    assert_non_null(strstr(infer, "--max-new-tokens"));
    assert_null(strstr(infer, "--lr"));
    for (const char *line = train; *line; line += strcspn(line, "\n") + 1) assert_true(strcspn(line, "\n") <= 100);
    for (const char *line = infer; *line; line += strcspn(line, "\n") + 1) assert_true(strcspn(line, "\n") <= 100);
    free(train), free(infer);
}

static void help_searches_names_and_texts(void **state) {
    (void)state;
    char *text = help_of(MT_PROGRAM_TRAIN, "rotary_base");
    assert_int_equal(strncmp(text, "  --rotary-base N", 17), 0);
    assert_null(strstr(text, "--lr"));
    free(text);
    text = help_of(MT_PROGRAM_TRAIN, "WARM-UP");
    assert_non_null(strstr(text, "--lr-warmup-iters"));
    free(text);
    text = help_of(MT_PROGRAM_TRAIN, "--lr");
    assert_non_null(strstr(text, "  --lr N"));
    free(text);
    text = help_of(MT_PROGRAM_TRAIN, "fp16-lm-cross-entropy");
    assert_non_null(strstr(text, "is not supported"));
    free(text);
}

static void configuration_prints_what_differs_from_defaults(void **state) {
    (void)state;
    mt_run_options options;
    expect_good(&options, RUN "--weight-decay 0.1 --adam-beta1 0.9");
    FILE *file = tmpfile();
    mt_options_print(&options, MT_PROGRAM_TRAIN, file);
    char *text = read_stream(file);
    assert_non_null(strstr(text, "weight-decay                         0.1\n"));
    assert_non_null(strstr(text, "lr                                   0.001\n"));
    assert_null(strstr(text, "adam-beta1"));
    free(text);
    mt_options_free(&options);
}

/* ---- YAML */

#ifdef MT_HAVE_YAML
static void yaml_sets_options_and_the_command_line_wins(void **state) {
    (void)state;
    mt_run_options options;
    char *folder = make_folder(), line[300];
    char *path =
        write_file(folder, "run.yaml",
                   "# a run\nmodel:\n  num_layers: 3\n  hidden-size: 64\n  attention: {num_attention_heads: 4}\n"
                   "  swiglu: true\n  disable_bias_linear: false\nvocab_size: 300\nseq_length: 16\n"
                   "data_path: [0.5, a, 0.5, \"b c\"]\nlr: 1e-3\ntrain_iters: 10\nsave: null\nsplit: ~\n"
                   "fp16: False\nload: None\nuse_rotary_position_embeddings: True\nwandb_project: null\n"
                   "qk_layernorm: False\n");
    snprintf(line, sizeof line, "--lr 5e-4 --config %s --num-layers 2", path);
    expect_good(&options, line);
    assert_int_equal(options.stack.num_layers, 2);
    assert_int_equal(options.stack.hidden_size, 64);
    assert_true(options.stack.swiglu && options.add_bias_linear && options.stack.lr == 5e-4);
    assert_int_equal(options.data_path.count, 4);
    assert_string_equal(options.data_path.items[3], "b c");
    assert_null(options.save);
    assert_null(options.load);
    assert_int_equal(options.stack.position_embedding_type, MT_POSITION_ROPE);
    assert_string_equal(options.split, "969,30,1");
    mt_options_free(&options);
    snprintf(line, sizeof line, "--config %s --swiglu=false", path);
    expect_good(&options, line);
    assert_false(options.stack.swiglu);
    mt_options_free(&options);
    remove_file(path);
    remove_folder(folder);
}

static void yaml_has_the_booleans_of_yaml_1_1(void **state) {
    (void)state;
    static const char *const words[] = {"true", "True", "yes", "Yes", "YES", "on", "On"};
    static const char *const negatives[] = {"false", "FALSE", "no", "No", "NO", "off", "Off"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        char text[100];
        mt_run_options options;
        mt_error error = {""};
        snprintf(text, sizeof text, "swiglu: %s\ndisable_bias_linear: %s\nbf16: %s\n", words[i], words[i],
                 negatives[i]);
        mt_options_default(&options);
        if (mt_options_read_yaml(&options, MT_PROGRAM_TRAIN, text, (int64_t)strlen(text), "run.yaml", &error) != 0)
            fail_msg("%s", error.text);
        assert_true(options.stack.swiglu && !options.add_bias_linear && !options.stack.bf16);
        mt_options_free(&options);
    }
}

static int read_yaml(mt_run_options *options, const char *text, mt_error *error) {
    mt_options_default(options);
    return mt_options_read_yaml(options, MT_PROGRAM_TRAIN, text, (int64_t)strlen(text), "run.yaml", error);
}

/* As PyYAML reads them; an octal number, 017, would be another one for most who write it. */
static void yaml_has_the_numbers_of_yaml_1_1(void **state) {
    (void)state;
    static const struct {
        const char *text;
        double value; // of --seq-length or --lr; 0: refused
    } cases[] = {
        {"seq_length: 1_000", 1000},
        {"seq_length: 0x1F", 31},
        {"seq_length: 0b101", 5},
        {"seq_length: +12", 12},
        {"seq_length: 0xf_f", 255},
        {"seq_length: '017'", 17},
        {"lr: 1_0.5", 10.5},
        {"lr: .5", .5},
        {"lr: 1_0e-1_0", 1e-9},
        {"seq_length: 017", 0},
        {"seq_length: 00", 0},
        {"seq_length: 0o17", 0},
        {"seq_length: 1__0", 0},
        {"seq_length: _10", 0},
        {"seq_length: 10_", 0},
        {"seq_length: 0x", 0},
        {"seq_length: 0xFG", 0},
        {"seq_length: 0b12", 0},
        {"seq_length: 1:30", 0},
        {"seq_length: 1e3", 0},
        {"seq_length: +-1", 0},
        {"lr: .inf", 0},
        {"lr: .nan", 0},
        {"lr: 1_.5", 0},
        {"lr: 1e_5", 0},
        {"bf16: tRue", 0},
        {"bf16: oN", 0},
        {"bf16: y", 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_run_options options;
        mt_error error = {""};
        int status = read_yaml(&options, cases[i].text, &error);
        double found = status != 0 ? 0 : cases[i].text[0] == 'l' ? options.stack.lr : (double)options.stack.seq_length;
        if (found != cases[i].value || (status != 0) != (cases[i].value == 0))
            fail_msg("%s gives %g: %s", cases[i].text, found, error.text);
        mt_options_free(&options);
    }
}

static void yaml_lists_the_layers_of_every_option_that_names_them(void **state) {
    (void)state;
    static const char *const keys[] = {"moe_layer_freq", "window_attn_skip_freq", "no_rope_freq",
                                       "linear_attention_freq"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char text[80];
        mt_run_options options;
        mt_error error = {""};
        snprintf(text, sizeof text, "num_layers: 3\n%s: [0, 1, 1]\n", keys[i]);
        if (read_yaml(&options, text, &error) != 0) fail_msg("%s", error.text);
        const char *const found[] = {options.moe_layer_freq, options.window_attn_skip_freq, options.no_rope_freq,
                                     options.linear_attention_freq};
        assert_string_equal(found[i], "[0,1,1]");
        mt_options_free(&options);
    }
}

/* A file of options has what a file of roles has: aliases, merges, references. */
static void yaml_values_may_be_aliases_merges_and_references(void **state) {
    (void)state;
    static const char text[] = "model: &small\n  num_layers: 2\n  hidden_size: &width 64\n  lr: 1\n"
                               "again: {<<: *small, lr: 1.0, ffn_hidden_size: *width}\n"
                               "seq_length: ${model.num_layers}${.num_layers_too}\nnum_layers: ${layers}\nlayers: 2\n"
                               "save: \"/a/\\\\${x}\"\ntensorboard_dir: 1_000\n";
    mt_run_options options;
    mt_error error = {""};
    assert_int_equal(read_yaml(&options, text, &error), -1);
    assert_non_null(strstr(error.text, "run.yaml:6: ${.num_layers_too}: the file has no such key"));
    mt_options_free(&options);
    char *good = mt_strdup(text), *wrong = strstr(good, "_too");
    memmove(wrong, wrong + 4, strlen(wrong + 4) + 1);
    if (read_yaml(&options, good, &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(options.stack.seq_length, 22);
    assert_int_equal(options.stack.ffn_hidden_size, 64);
    assert_string_equal(options.save, "/a/${x}");
    assert_string_equal(options.tensorboard_dir, "1_000");
    mt_options_free(&options);
    free(good);
}

static void expect_yaml_error(const char *text, const char *expected) {
    mt_run_options options;
    mt_error error = {""};
    mt_options_default(&options);
    if (mt_options_read_yaml(&options, MT_PROGRAM_TRAIN, text, (int64_t)strlen(text), "run.yaml", &error) == 0)
        fail_msg("%s\n  was accepted", text);
    if (!strstr(error.text, expected)) fail_msg("%s\n  gave: %s\n  not: %s", text, error.text, expected);
    mt_options_free(&options);
}

/* The text of `count` brackets. */
static char *brackets(int count) {
    char *text = mt_calloc(count + 8);
    strcpy(text, "x: ");
    memset(text + 3, '[', (size_t)count);
    return strcat(text, "\n");
}

static void expect_role_error(const char *text, const char *expected) {
    mt_run_options options;
    mt_error error = {""};
    mt_options_default(&options);
    if (mt_options_read_role(&options, MT_PROGRAM_TRAIN, "sft_train", text, (int64_t)strlen(text), "run.yaml",
                             &error) == 0)
        fail_msg("%s\n  was accepted", text);
    if (!strstr(error.text, expected)) fail_msg("%s\n  gave: %s\n  not: %s", text, error.text, expected);
    mt_options_free(&options);
}

/* The parser compares each anchor, and each alias, with all anchors before it. */
static void many_anchors_are_refused_before_they_are_parsed(void **state) {
    (void)state;
    char text[16384] = "x: [";
    char *end = text + strlen(text);
    for (int i = 0; i < 500; i++) end += snprintf(end, 32, "&a%d 1, *a%d, ", i, i);
    strcpy(end, "]\n");
    expect_role_error(text, "has no sections of roles");
    strcpy(end, "*a7]\n");
    expect_yaml_error(text, "run.yaml:1: has more than 1000 anchors and aliases");
    expect_role_error(text, "run.yaml:1: has more than 1000 anchors and aliases");
}

/* The parser would read such a text in a time that grows with the square of its nesting. */
static void deep_yaml_is_refused_before_it_is_parsed(void **state) {
    (void)state;
    for (int count = 16; count < 20; count++) { // the key's section is a level too
        char *text = brackets(count);
        expect_yaml_error(text, "run.yaml:1: sections and lists are nested deeper than 16");
        expect_role_error(text, "run.yaml:1: sections and lists are nested deeper than 16");
        free(text);
    }
    expect_yaml_error("- - - - - - - - - - - - - - - - - 1\n", "nested deeper than 16");
    expect_yaml_error("x: \"]]]]\"\ny: [[[[[[[[[[[[[[[[[ #]]]]]]]]]]]]]\n",
                      "run.yaml:2: sections and lists are nested");
    expect_yaml_error("x: [\"[[[[[[[[[[[[[[[[[[[[[[\"]\n", "unknown option x");
    expect_yaml_error("x: [1\n", "run.yaml:1: is not YAML");
}

/* Each unknown name is compared with all options, so their number is bounded. */
static void many_unknown_names_are_counted(void **state) {
    (void)state;
    char *text = mt_calloc(200 * 10);
    for (int i = 0; i < 150; i++) sprintf(text + strlen(text), "zzz%d: 1\n", i);
    expect_yaml_error(text, "150 options cannot be used, here the first 100:");
    free(text);
}

/* Parses a line with --config FILE and one word more. */
static int parse_config(mt_run_options *options, const char *text, const char *more, mt_error *error) {
    char *folder = make_folder(), word[80];
    char *path = write_file(folder, "run.yaml", text);
    snprintf(word, sizeof word, "%s", more);
    char *words[] = {"train", "--config", path, word};
    int status = mt_options_read(options, MT_PROGRAM_TRAIN, *word ? 4 : 3, words, error);
    remove_file(path);
    remove_folder(folder);
    return status;
}

/* The text that ends the origin of an option. */
static void expect_origin(const mt_run_options *options, const char *name, const char *end) {
    char *origin = mt_option_origin_text(options, mt_option_find(name, strlen(name)));
    if (*end ? !mt_text_ends_with(origin, end) : *origin != 0) fail_msg("--%s is of %s, not %s", name, origin, end);
    free(origin);
}

static void every_value_has_its_origin(void **state) {
    (void)state;
    mt_run_options options;
    mt_error error = {""};
    static const char text[] = "lr: 1e-3\nmodel:\n  num_layers: 2\n  num_moe_experts: 4\nmin_lr: 0\n";
    if (parse_config(&options, text, "--lr=1", &error) != 0) fail_msg("%s", error.text);
    expect_origin(&options, "lr", "command line");
    expect_origin(&options, "num-layers", "run.yaml:3");
    expect_origin(&options, "num-experts", "run.yaml:4");
    expect_origin(&options, "hidden-size", "");
    mt_option_reset(&options, mt_option_find("num-layers", 10));
    expect_origin(&options, "num-layers", "");
    mt_options_free(&options);
    mt_options_default(&options);
    static const char json[] = "{\"model_type\": \"llama\", \"num_hidden_layers\": 2, \"hidden_size\": 64, "
                               "\"num_attention_heads\": 4, \"intermediate_size\": 128, \"vocab_size\": 300, "
                               "\"max_position_embeddings\": 16}";
    if (mt_options_read_hf_config(&options, json, (int64_t)strlen(json), "config.json", &error) != 0)
        fail_msg("%s", error.text);
    expect_origin(&options, "num-layers", "config.json");
    mt_options_free(&options);
}

/* The origins are in the message, once each, and the message is the same after a second pass. */
static void contradictions_have_both_origins(void **state) {
    (void)state;
    static const char text[] = "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nvocab_size: 300\n"
                               "seq_length: 16\ntrain_iters: 10\nlr: 1\nrecompute_num_layers: 1\n";
    mt_run_options options;
    mt_error error = {""};
    expect_yaml_error("lr: 1\na: {lr: 2}\n", "run.yaml:2: lr is given twice in this file, with the values 2 and, as "
                                             "run.yaml:1: lr, 1");
    expect_yaml_error("swiglu: true\nswiglu: false\n", "run.yaml:2: swiglu is given twice in this file");
    assert_int_equal(parse_config(&options, text, "--mock-data", &error), 0);
    assert_int_equal(mt_options_finish(&options, MT_PROGRAM_TRAIN, 1, &error), -1);
    if (!strstr(error.text, "run.yaml:8) needs --recompute-granularity")) fail_msg("%s", error.text);
    char before[sizeof error.text];
    strcpy(before, error.text);
    mt_options_name_typed(&options, &error);
    assert_string_equal(error.text, before);
    mt_options_free(&options);
}

#define VARIABLE "MT_TEST_VARIABLE"

static void a_file_of_megatrons_tests_is_read(void **state) {
    (void)state;
    static const char text[] = "ENV_VARS:\n  CUDA_DEVICE_MAX_CONNECTIONS: 1\n  MT_TEST_DIR: /data/${MT_TEST_USER}\n"
                               "  MT_TEST_USER: me\nTEST_TYPE: regular\nMODEL_ARGS:\n"
                               "  --num-layers: 2\n  --bf16: true\n  --swiglu: false\n  --lr: 1.0e-5\n"
                               "  --data-path: 0.5 ${MT_TEST_DIR}/a 0.5 ${MT_TEST_DIR}/b\n"
                               "  --recompute-modules: \"[layernorm mlp]\"\n  --moe-layer-freq: ([0]*1+[1]*1)\n"
                               "  --save: ${" VARIABLE "}/x\n";
    mt_run_options options;
    mt_error error = {""};
    unsetenv(VARIABLE);
    assert_int_equal(parse_config(&options, text, "", &error), -1);
    if (!strstr(error.text, "run.yaml:14: save has ${" VARIABLE "}, which is not set; export it"))
        fail_msg("%s", error.text);
    mt_options_free(&options);
    if (parse_config(&options, text, "--print-config", &error) != 0) fail_msg("%s", error.text);
    assert_null(options.save);
    mt_options_free(&options);
    if (parse_config(&options, text, "--save=/mine", &error) != 0) fail_msg("%s", error.text);
    assert_string_equal(options.save, "/mine");
    mt_options_free(&options);
    setenv(VARIABLE, "/runs", 1);
    if (parse_config(&options, text, "", &error) != 0) fail_msg("%s", error.text);
    assert_string_equal(options.save, "/runs/x");
    assert_int_equal(options.data_path.count, 4);
    assert_string_equal(options.data_path.items[3], "/data/me/b");
    assert_true(options.stack.bf16 && !options.stack.swiglu && options.stack.lr == 1e-5);
    assert_int_equal(options.stack.recompute_modules, MT_MODULE_LAYERNORM | MT_MODULE_MLP);
    assert_string_equal(options.moe_layer_freq, "([0]*1+[1]*1)");
    mt_options_free(&options);
    static const char blend[] = "MODEL_ARGS:\n  --data-path: $" VARIABLE "\n  --save: /$" VARIABLE "s/$1$\n";
    setenv(VARIABLE, "0.3 a 0.7 b", 1);
    setenv(VARIABLE "s", "runs", 1);
    if (parse_config(&options, blend, "", &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(options.data_path.count, 4);
    assert_string_equal(options.data_path.items[3], "b");
    assert_string_equal(options.save, "/runs/$1$");
    mt_options_free(&options);
    unsetenv(VARIABLE "s");
    unsetenv(VARIABLE);
    expect_yaml_error(blend, "has ${" VARIABLE "}, which is not set; export it");
    if (parse_config(&options, "save: $" VARIABLE "\n", "", &error) != 0) fail_msg("%s", error.text);
    assert_string_equal(options.save, "$" VARIABLE); // a file of another form has braces
    mt_options_free(&options);
    expect_yaml_error("MODEL_ARGS: {--num-layers: 2 3}\n", "run.yaml:1: num-layers expects a whole number, got '2 3'");
    expect_yaml_error("MODEL_ARGS: {--bf16: x}\n", "run.yaml:1: bf16 expects true or false, got 'x'");
    expect_yaml_error("MODEL_ARGS: {--num-layer: 2}\n",
                      "run.yaml:1: unknown option num-layer; did you mean num_layers?");
    expect_yaml_error("MODE: inference\nMODEL_ARGS: {--num-layers: 2}\n", "run.yaml:1: MODE is inference, whose file");
}

/* The whole error. */
static void expect_yaml_line(const char *text, const char *expected) {
    mt_run_options options;
    mt_error error = {""};
    mt_options_default(&options);
    if (mt_options_read_yaml(&options, MT_PROGRAM_TRAIN, text, (int64_t)strlen(text), "run.yaml", &error) == 0)
        fail_msg("%s\n  was accepted", text);
    assert_string_equal(error.text, expected);
    mt_options_free(&options);
}

static void files_of_other_programs_have_one_line(void **state) {
    (void)state;
    expect_yaml_line("MODEL_ARGS:\n  --foo: 1\n  --lr: 1\n  --lr: fast\nMODE: rl\n",
                     "run.yaml:5: MODE is rl, whose file is not read: it is of another program of Megatron-LM than its "
                     "pre-training; --stage rl has reinforcement learning, with options of its own (--help)");
    expect_yaml_line("MODEL_ARGS:\n  --lr: 1\n  --img-h: 336\n  --img-w: 336\n  --patch-dim: 14\n",
                     "run.yaml:3: img-h, img-w, patch-dim are not supported (models that read images, in Megatron-LM's "
                     "form)");
    expect_yaml_line("MODEL_ARGS: {--flextron: true, --slice: true, --router-std: 1, --budget-type: param, "
                     "--tau-init: 1, --tau-decay: 1, --loss-alpha: 1, --soft-mask: true}\n",
                     "run.yaml:1: flextron, slice, router-std, budget-type, tau-init, tau-decay and 2 more are not "
                     "supported (models of elastic size: Flextron)");
    // names that were refused, before a value that is refused too
    expect_yaml_line("MODEL_ARGS:\n  --dataset-provider: llava_vlm\n  --dataloader-type: external\n",
                     "run.yaml:2: dataset-provider is not supported (models of images and text (MIMO))");
}

/* A vocabulary of WordPiece is the only sign of BERT in a file of options. */
static void vocabularies_of_words_are_refused(void **state) {
    (void)state;
    mt_run_options options;
    mt_error error;
    const char *why = ": a list of words is WordPiece's, of BERT and of T5 in Megatron-LM: it is not read; ";
    expect_yaml_error("MODEL_ARGS:\n  --lr: 1\n  --vocab-file: /nowhere/vocab.txt\n",
                      "run.yaml:3: vocab-file /nowhere/vocab.txt: a list of words is WordPiece's");
    unsetenv(VARIABLE);
    expect_yaml_error("MODEL_ARGS: {--vocab-file: '${" VARIABLE "}/vocab.txt', --spec: local}\n", why);
    expect_error(RUN "--vocab-file /nowhere/vocab.txt --merge-file merges.txt", why);
    char *folder = make_folder(), *words = write_file(folder, "words.json", "[PAD]\n[UNK]\n"), text[300];
    snprintf(text, sizeof text, "vocab_file: %s\n", words);
    expect_yaml_error(text, why);
    if (parse_config(&options, text, "--vocab-file=a.json", &error) != 0) fail_msg("%s", error.text);
    mt_options_free(&options);
    char *list = write_file(folder, "vocab.txt", " {\"a\": 0}"); // JSON, whatever it is called
    snprintf(text, sizeof text, "vocab_file: %s\n", list);
    if (parse_config(&options, text, "", &error) != 0) fail_msg("%s", error.text);
    mt_options_free(&options);
    remove_file(words), remove_file(list);
    remove_folder(folder);
}

/* As on a command line: argparse takes the last. */
static void arguments_of_a_file_may_be_given_again(void **state) {
    (void)state;
    mt_run_options options;
    mt_error error;
    const char *text = "MODEL_ARGS:\n  --lr: 1\n  --timing-log-level: 0\n  --seed: 3\n  --timing-log-level: 1\n"
                       "  --timing-log-level: 2\n  --seed: 3\n";
    if (parse_config(&options, text, "", &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(options.timing_log_level, 2);
    mt_options_free(&options);
    assert_int_equal(parse_config(&options, text, "--strict-options", &error), -1);
    assert_non_null(strstr(error.text, "run.yaml:3: timing-log-level (line 5 gives it again, 1, which is taken"));
    assert_non_null(strstr(error.text, "run.yaml:5: timing-log-level (line 6 gives it again, 2, which is taken"));
    assert_null(strstr(error.text, "seed"));
    mt_options_free(&options);
    expect_yaml_error("MODEL_ARGS:\n  --lr: 1\n  --learning-rate: 2\n", // two names
                      "run.yaml:3: learning-rate is given twice in this file, with the values 2 and, as run.yaml:2: ");
}

static void bad_yaml_is_refused_with_file_and_line(void **state) {
    (void)state;
    expect_yaml_error("enable_autocast: True\nlr: 1\nfoo: [1, [2]]\nfn: a\n",
                      "3 options cannot be used:\n"
                      "  is not supported (other types of logits and of the loss): "
                      "run.yaml:1: enable_autocast\n"
                      "  is unknown: run.yaml:3: foo\n"
                      "  has no meaning here (it is a Python function, or a part of one of Megatron's configuration "
                      "classes); leave out: run.yaml:4: fn");
    expect_yaml_error("lr: 1\nnum_layer: 3\n", "run.yaml:2: unknown option num_layer; did you mean num_layers?");
    expect_yaml_error("prompt: x\n", "run.yaml:1: prompt is an option of infer, not of train");
    expect_yaml_error("lr: 1\nlr: 2\n", "run.yaml:2: lr is given twice in this file");
    expect_yaml_error("norm_epsilon: 1\nlayernorm_epsilon: 2\n", "is given twice");
    expect_yaml_error("use_megatron_fsdp: true\nuse_layer_wise_distributed_optimizer: true\n",
                      "run.yaml:2: use_layer_wise_distributed_optimizer and ");
    expect_yaml_error("lr: fast\n", "run.yaml:1: lr expects a number, got 'fast'");
    expect_yaml_error("lr: [1, 2]\n", "lr expects a number, not a list");
    expect_yaml_error("lr: {a: 1}\n", "lr expects a number, not a section");
    expect_yaml_error("bf16: y\n", "bf16 expects true or false, got 'y'");
    expect_yaml_error("bf16: 1\n", "bf16 expects true or false");
    expect_yaml_error("moe_layer_freq: [0, 2]\n", "moe_layer_freq expects 0 or 1 for each layer in its list");
    expect_yaml_error("moe_layer_freq: [[0]]\n", "moe_layer_freq expects 0 or 1 for each layer in its list");
    expect_yaml_error("moe_layer_freq: [0\n", "is not YAML");
    expect_yaml_error("data_path: [[a]]\n", "expects plain values in its list");
    expect_yaml_error("- lr\n", "expects lines such as");
    expect_yaml_error("lr\n", "expects lines such as");
    expect_yaml_error("? [a]\n: 3\n", "expects the name of an option");
    expect_yaml_error("--: 3\n", "expects the name of an option");
    expect_yaml_error("a: &x {lr: 1}\nb: *x\nlr: 2\n", "run.yaml:3: lr is given twice in this file");
    expect_yaml_error("a: &x {<<: *x}\n", "run.yaml:1: << merges what is no section, or itself");
    expect_yaml_error("a: &x {b: *x}\n", "sections are nested deeper");
    expect_yaml_error("a: &x [1, *x]\ndata_path: *x\n", "run.yaml:2: data_path expects plain values in its");
    expect_yaml_error("data_path: &x [1, *x]\n", "expects plain values in its list");
    expect_yaml_error("lr: ${nothing.here}\n", "run.yaml:1: ${nothing.here}: the file has no such key");
    expect_yaml_error("lr: ${lr}\n", "run.yaml:1: '${lr}' refers to itself");
    expect_yaml_error("lr: \"1\n", "run.yaml:");
    expect_yaml_error("lr: 1\n---\nlr: 2\n", "a second document");
    expect_yaml_error("save: \"a\\0b\"\n", "holds a zero byte");
    expect_yaml_error("a: {b: {c: {d: {e: {f: {g: {h: {i: 1}}}}}}}}\n", "nested deeper");
}

/* Each section has the keys of all before it. */
static void yaml_merges_do_not_explode(void **state) {
    (void)state;
    char *text = mt_calloc(1 << 16), *end = text;
    for (int i = 0; i < 60; i++) {
        end += sprintf(end, "s%d: &s%d {", i, i);
        for (int j = 0; j < 40; j++) end += sprintf(end, "k%d_%d: 1, ", i, j);
        end += i > 0 ? sprintf(end, "<<: *s%d}\n", i - 1) : sprintf(end, "a: 1}\n");
    }
    expect_yaml_error(text, "holds more than options could need");
    expect_role_error(text, "holds more than options could need");
    free(text);
}

static void huge_yaml_is_refused(void **state) {
    (void)state;
    int64_t bytes = 1 << 20;
    char *text = mt_malloc(bytes + 32);
    int start = sprintf(text, "data_path: [");
    for (int64_t i = start; i < bytes; i += 2) memcpy(text + i, "a,", 2);
    strcpy(text + bytes, "a]\n");
    expect_yaml_error(text, "more than options could need");
    memset(text, '[', (size_t)bytes);
    expect_yaml_error(text, "run.yaml");
    free(text);
    char *folder = make_folder(), line[300];
    text = mt_malloc((5 << 20) + 1);
    memset(text, '#', 5 << 20);
    text[5 << 20] = 0;
    char *path = write_file(folder, "huge.yaml", text);
    snprintf(line, sizeof line, RUN "--config %s", path);
    expect_error(line, "far too large");
    free(text);
    remove_file(path);
    path = write_file(folder, "nested.yaml", "config: other.yaml\n");
    snprintf(line, sizeof line, RUN "--config %s", path);
    expect_error(line, "names another --config");
    snprintf(line, sizeof line, RUN "--config %s --yaml-cfg=other.yaml", path);
    expect_error(line, "--config and --yaml-cfg name two files; one is read, so leave one out");
    snprintf(line, sizeof line, RUN "--config a.yaml --config b.yaml");
    expect_error(line, "--config and --config name two files");
    remove_file(path);
    remove_folder(folder);
}

static void an_empty_yaml_sets_nothing(void **state) {
    (void)state;
    const char *const texts[] = {"", "# nothing\n", "---\n", "null\n"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        mt_run_options options;
        mt_error error;
        mt_options_default(&options);
        int64_t bytes = (int64_t)strlen(texts[i]);
        assert_int_equal(mt_options_read_yaml(&options, MT_PROGRAM_TRAIN, texts[i], bytes, "run.yaml", &error), 0);
        assert_int_equal(options.given[0] | options.given[1] | options.given[2] | options.given[3], 0);
        mt_options_free(&options);
    }
}
#else
static void yaml_is_refused_without_the_library(void **state) {
    (void)state;
    mt_run_options options;
    mt_error error;
    mt_options_default(&options);
    assert_int_equal(mt_options_read_yaml(&options, MT_PROGRAM_TRAIN, "", 0, "run.yaml", &error), -1);
    assert_non_null(strstr(error.text, "built without libyaml"));
    mt_options_free(&options);
}
#endif

/* ---- config.json */

/* The parameters of a model, counted here by hand so that a mistake in a shape shows. */
static int64_t count_parameters(const mt_options *o) {
    int64_t C = o->hidden_size, D = o->kv_channels, H = o->num_attention_heads, G = o->num_query_groups;
    int64_t F = o->ffn_hidden_size, norm = o->normalization == MT_LAYERNORM ? 2 * C : C;
    int64_t layer = C * (H + 2 * G) * D + H * D * C + (o->swiglu ? 3 : 2) * C * F + 2 * norm;
    if (o->add_qkv_bias) layer += (H + 2 * G) * D;
    if (o->attention_output_bias) layer += C;
    if (o->mlp_bias) layer += (o->swiglu ? 2 : 1) * F + C;
    if (o->qk_layernorm) layer += 2 * D;
    int64_t learned = o->position_embedding_type == MT_POSITION_LEARNED_ABSOLUTE ? o->max_position_embeddings * C : 0;
    int64_t embeddings = o->vocab_size * C * (o->untie_embeddings_and_output_weights ? 2 : 1);
    return embeddings + learned + o->num_layers * layer + norm;
}

static void published_shapes_have_their_published_numbers_of_parameters(void **state) {
    (void)state;
    const struct {
        const char *name, *family;
        int64_t parameters; // 0: ours, nothing published
    } models[] = {
        {"gpt2-124m", "gpt2", 124439808},
        {"gpt2-355m", "gpt2", 354823168},
        {"gpt2-774m", "gpt2", 774030080},
        {"gpt2-1558m", "gpt2", 1557611200},
        {"llama3-8b", "llama", 8030261248},
        {"llama3-70b", "llama", 70553706496},
        {"qwen3-0.6b", "qwen3", 596049920},
        {"qwen3-8b", "qwen3", 8190735360},
        {"llama2c-110m", "llama", 109529856},
        {"qwen3-30b-a3b", "qwen3_moe", 30532122624},
        {"mixtral-8x7b", "mixtral", 46702792704},
        {"qwen1.5-moe-a2.7b", "qwen2_moe", 14315784192},
        {"deepseek-v3", "deepseek_v3", 671026419200},      // the biases of its routers too
        {"glm-4.5-air", "glm4_moe", 106852251264},         // likewise; without its module that predicts a second token
        {"qwen3-next-80b-a3b", "qwen3_next", 79674391296}, // likewise
        {"qwen3.5-35b-a3b", "qwen3_5_moe_text", 34660610688},
        {"tiny-gpt2", "gpt2", 0},
        {"tiny-llama", "llama", 0},
        {"tiny-qwen3", "qwen3", 0},
    };
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        mt_run_options options;
        char line[300];
        snprintf(line, sizeof line,
                 "--hf-config data/configs/%s.json --mock-data --seq-length 256 --train-iters 1 --lr 1",
                 models[i].name);
        expect_good(&options, line);
        assert_string_equal(mt_hf_family_name(options.stack.hf_family), models[i].family);
        if (models[i].parameters) assert_int_equal(mt_num_parameters(&options.stack), models[i].parameters);
        if (options.stack.num_experts > 0)
            assert_true(options.stack.moe_layers != NULL);
        else if (models[i].parameters)
            assert_int_equal(count_parameters(&options.stack), models[i].parameters);
        else
            assert_true(count_parameters(&options.stack) < 10000000);
        mt_options_free(&options);
    }
}

static void operation_count_of_llama3_8b_equals_megatron(void **state) {
    (void)state;
    mt_run_options options;
    expect_good(&options,
                "--hf-config data/configs/llama3-8b.json --mock-data --seq-length 8192 --train-iters 1 --lr 1");
    assert_true(mt_flops(&options.stack, 8) == 3373164235063296.0); // golden/megatron/flops.json
    mt_options_free(&options);
}

/* By Megatron's formula, and what DeepSeek-V3's report says of its attention: 187,107,328 parameters a layer. */
static void operation_count_of_qwen3_30b_equals_megatron(void **state) {
    (void)state;
    mt_run_options options;
    expect_good(&options, "--hf-config data/configs/qwen3-30b-a3b.json --mock-data --seq-length 4096 --train-iters 1 "
                          "--lr 1");
    assert_true(fabs(mt_flops(&options.stack, 8) / 753869839663104.0 - 1) < 1e-12); // tests/golden/megatron/flops.json
    mt_options_free(&options);
}

/* Of 4,096 queries, query t sees min(t + 1, W) keys, for scores and for values of 4 heads of 16 channels. */
/* The tower of Qwen2.5-VL-7B for 74 x 74 patches: windows of 8 x 8, those at the edges of 2. */
static void a_tower_counts_products_and_pairs_of_patches(void **state) {
    (void)state;
    mt_options o = {.hidden_size = 3584};
    o.vision = (mt_vision_options){.tower = MT_VISION_QWEN2_5,
                                   .num_layers = 32,
                                   .hidden_size = 1280,
                                   .ffn_hidden_size = 3420,
                                   .num_attention_heads = 16,
                                   .patch_size = 14,
                                   .temporal_patch_size = 2,
                                   .spatial_merge_size = 2,
                                   .window_size = 112,
                                   .full_layers = 1 << 7 | 1 << 15 | 1 << 23 | 1u << 31};
    double P = 74 * 74, tower = P * (1176 * 1280. + 32 * (4 * 1280. * 1280 + 3 * 1280 * 3420.));
    tower += 2 * 1280 * (4 * P * P + 28 * (9 * 64. + 4) * (9 * 64. + 4));
    double merger = P / 4 * (5120. * 5120 + 5120 * 3584.);
    assert_true(fabs(mt_image_flops(&o, 74, 74) / (6 * (tower + merger)) - 1) < 1e-12);
    o.vision.freeze = true;
    assert_true(fabs(mt_image_flops(&o, 74, 74) / (2 * tower + 4 * merger) - 1) < 1e-12);
    o.vision.freeze_projector = true;
    assert_true(fabs(mt_image_flops(&o, 74, 74) / (2 * tower + 2 * merger) - 1) < 1e-12);
    o.vision = (mt_vision_options){.tower = MT_VISION_QWEN3, .num_layers = 3, .hidden_size = 32, .ffn_hidden_size = 48};
    o.vision.patch_size = 4, o.vision.temporal_patch_size = o.vision.spatial_merge_size = 2;
    o.vision.num_attention_heads = 4, o.vision.deepstack_layers = 5, o.hidden_size = 40;
    double flops = 6 * (32 * (96 * 32. + 3 * (4 * 32 * 32. + 2 * 32 * 48)) + 2 * 32 * 3 * 32. * 32);
    flops += 6 * 3 * 8 * (128. * 128 + 128 * 40); // three mergers
    assert_true(fabs(mt_image_flops(&o, 4, 8) / flops - 1) < 1e-12);
    o.vision.tower = MT_VISION_NONE;
    assert_true(mt_image_flops(&o, 4, 8) == 0);
}

static void a_window_counts_its_keys_only(void **state) {
    (void)state;
    double counts[3], keys[3] = {0};
    for (int i = 0; i < 3; i++) {
        int64_t T = 4096, W = i == 0 ? T : i == 1 ? 1000 : 64;
        mt_run_options o;
        char line[400];
        snprintf(
            line, sizeof line,
            "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --vocab-size 256 --mock-data --seq-length %lld "
            "--train-iters 1 --lr 1 --position-embedding-type rope --window-size %lld",
            (long long)T, (long long)W);
        expect_good(&o, line);
        counts[i] = mt_flops(&o.stack, 1);
        for (int64_t t = 0; t < T; t++) keys[i] += (double)(t < W ? t + 1 : W);
        mt_options_free(&o);
    }
    for (int i = 1; i < 3; i++) {
        double fewer = (counts[0] - counts[i]) / (6 * 2 * 4 * 16 * (keys[0] - keys[i]));
        assert_true(fabs(fewer - 1) < 1e-3);
    }
}

static void latent_attention_counts_as_megatron_counts_it(void **state) {
    (void)state;
    const char *shape =
        "--num-layers 1 --hidden-size 7168 --num-attention-heads 128 --ffn-hidden-size 18432 --vocab-size "
        "129280 --mock-data --seq-length 4096 --train-iters 1 --lr 1 --swiglu --normalization RMSNorm "
        "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights "
        "--multi-latent-attention --qk-layernorm --kv-lora-rank 512 ";
    for (int latent = 0; latent < 2; latent++) { // of the queries
        mt_run_options o;
        char line[700];
        snprintf(line, sizeof line, "%s%s", shape, latent ? "--q-lora-rank 1536" : "");
        expect_good(&o, line);
        double C = 7168, width = 128 * 192, queries = latent ? 1536 * (C + width + 1) : C * width;
        double attention =
            queries + 512 * (C + 128 * 256 + 1) + C * 64 + 128 * 128 * C + 4096. / 2 * (width + 128 * 128);
        double flops = 6 * 4096. * (attention + 3 * C * 18432 + C * (double)o.stack.padded_vocab_size);
        double off = mt_flops(&o.stack, 1) / flops - 1;
        assert_true(off < 1e-12 && off > -1e-12);
        int64_t attention_parameters = latent ? 187107328 : 187107328 - 1536 * (7168 + 24576 + 1) + 7168 * 24576;
        assert_int_equal(mt_num_parameters(&o.stack),
                         attention_parameters + 3 * 7168 * 18432 + 3 * 7168 + 2 * 129280 * 7168);
        mt_options_free(&o);
    }
}

static void golden_configs_are_read_as_their_families_are(void **state) {
    (void)state;
    mt_run_options o;
    expect_good(&o, "--load tests/golden/hf/gpt2 --mock-data --seq-length 32 --train-iters 1 --lr 1");
    assert_true(o.stack.openai_gelu && !o.stack.swiglu && !o.stack.untie_embeddings_and_output_weights &&
                o.stack.mlp_bias && o.stack.add_qkv_bias);
    assert_true(o.stack.hidden_dropout == 0 && o.stack.attention_dropout == 0 && o.stack.norm_epsilon == 1e-5);
    assert_int_equal(o.stack.ffn_hidden_size, 128);
    assert_int_equal(o.eos_token_id, 1);
    mt_options_free(&o);
    expect_good(&o, "--load tests/golden/hf/qwen2 --mock-data --seq-length 32 --train-iters 1 --lr 1");
    assert_true(o.stack.add_qkv_bias && !o.stack.attention_output_bias && !o.stack.mlp_bias &&
                o.stack.rotary_base == 1e6 && !o.stack.qk_layernorm);
    assert_true(!o.stack.untie_embeddings_and_output_weights && o.stack.num_query_groups == 1 &&
                o.stack.window_size == 0);
    mt_options_free(&o);
    expect_good(&o, "--load tests/golden/hf/qwen3 --mock-data --seq-length 32 --train-iters 1 --lr 1");
    assert_true(o.stack.qk_layernorm && !o.stack.add_qkv_bias && o.stack.kv_channels == 16 &&
                o.stack.untie_embeddings_and_output_weights);
    mt_options_free(&o);
    expect_good(&o, "--load tests/golden/hf/llama3_rope_tied --mock-data --seq-length 32 --train-iters 1 --lr 1");
    assert_int_equal(o.stack.rope_scaling_type, MT_ROPE_SCALING_LLAMA3);
    assert_true(o.stack.rope_scaling_factor == 8 && o.stack.rope_low_freq_factor == 1 &&
                o.stack.rope_high_freq_factor == 4);
    assert_true(o.stack.original_max_position_embeddings == 16 && o.stack.rotary_base == 500000);
    mt_options_free(&o);
    expect_good(&o, "--load tests/golden/hf/mixtral --mock-data --seq-length 32 --train-iters 1 --lr 1");
    assert_true(o.stack.num_experts == 4 && o.stack.moe_router_topk == 2 && o.stack.moe_ffn_hidden_size == 32);
    assert_true(!o.stack.moe_router_pre_softmax && strcmp(o.stack.moe_layers, "1111") == 0);
    mt_options_free(&o);
    expect_good(&o, "--load tests/golden/hf/qwen3_moe --mock-data --seq-length 32 --train-iters 1 --lr 1");
    assert_true(o.stack.num_experts == 8 && o.stack.moe_router_topk == 4 && o.stack.moe_ffn_hidden_size == 16);
    assert_true(o.stack.ffn_hidden_size == 80 && o.stack.qk_layernorm && !o.stack.moe_router_pre_softmax &&
                !o.stack.moe_shared_expert_gate);
    mt_options_free(&o);
    expect_good(&o, "--load tests/golden/hf/qwen2_moe --mock-data --seq-length 32 --train-iters 1 --lr 1");
    assert_true(o.stack.num_experts == 6 && o.stack.moe_router_topk == 4 && o.stack.moe_ffn_hidden_size == 16 &&
                o.stack.add_qkv_bias);
    assert_true(o.stack.moe_shared_expert_gate && o.stack.moe_shared_expert_intermediate_size == 24 &&
                o.stack.moe_router_pre_softmax);
    assert_true(!o.stack.qk_layernorm && o.stack.ffn_hidden_size == 72 && strcmp(o.stack.moe_layers, "1011") == 0);
    mt_options_free(&o);
    expect_good(&o, "--load tests/golden/hf/deepseek_v3 --mock-data --seq-length 32 --train-iters 1 --lr 1");
    assert_true(o.stack.moe_router_enable_expert_bias && o.stack.multi_latent_attention &&
                o.stack.moe_layers[0] == '0');
    assert_int_equal(o.stack.moe_router_score_function, MT_SCORE_SIGMOID);
    mt_options_free(&o);
    expect_good(&o, "--load tests/golden/hf/deepseek_v3_dense --mock-data --seq-length 32 --train-iters 1 --lr 1");
    assert_true(o.stack.multi_latent_attention && o.stack.rotary_interleaved && o.stack.q_lora_rank == 20 &&
                o.stack.kv_lora_rank == 12);
    assert_true(o.stack.qk_head_dim == 6 && o.stack.qk_pos_emb_head_dim == 4 && o.stack.v_head_dim == 7 &&
                o.stack.num_query_groups == 4);
    assert_true(o.yarn_mscale == 0.7 && o.stack.yarn_mscale_all_dim == 1.2 && o.stack.rope_scaling_factor == 4);
    mt_options_free(&o);
    expect_good(&o,
                "--load tests/golden/hf/deepseek_v3_no_q_latent --mock-data --seq-length 32 --train-iters 1 --lr 1");
    assert_true(o.stack.multi_latent_attention && !o.stack.rotary_interleaved && o.stack.q_lora_rank == 0 &&
                o.stack.v_head_dim == 8);
    mt_options_free(&o);
}

#define EXPERTS                                                                                                        \
    "--num-layers 4 --hidden-size 8 --num-attention-heads 2 --vocab-size 32 --seq-length 8 --mock-data --train-iters " \
    "1 "                                                                                                               \
    "--ffn-hidden-size 16 --lr 1 --swiglu --disable-bias-linear --ffn-hidden-size 16 --num-experts 8 "

static void experts_have_the_matrices_and_biases_of_their_activation(void **state) {
    (void)state;
    static const struct {
        const char *words;
        int64_t matrices, biases; // of an expert; biases in widths of an expert, besides C
    } cases[] = {{"", 2, 1}, {"--openai-gelu ", 2, 1}, {"--swiglu ", 3, 2}};
    for (int k = 0; k < 6; k++) {
        int64_t parameters[2], C = 0, F = 5, L = 0, T = 0, added;
        double flops[2];
        for (int more = 0; more < 2; more++) {
            char line[512];
            mt_run_options o;
            snprintf(line, sizeof line, RUN "%s%s--moe-ffn-hidden-size 5 --num-experts %d --moe-router-topk %d",
                     cases[k / 2].words, k % 2 ? "--disable-bias-linear " : "", more ? 7 : 4, more ? 3 : 2);
            expect_good(&o, line);
            parameters[more] = mt_num_parameters(&o.stack), flops[more] = mt_flops(&o.stack, 1);
            C = o.stack.hidden_size, L = o.stack.num_layers, T = o.stack.seq_length;
            mt_options_free(&o);
        }
        added = cases[k / 2].matrices * C * F + C; // a row of the router too
        if (k % 2 == 0) added += cases[k / 2].biases * F + C;
        assert_int_equal(parameters[1] - parameters[0], 3 * L * added);
        assert_true(flops[1] - flops[0] == 6.0 * (double)(T * L * cases[k / 2].matrices * C * F));
    }
    expect_error(RUN "--num-experts 4 --moe-shared-expert-intermediate-size 8",
                 "--moe-shared-expert-intermediate-size needs --disable-bias-linear: a shared expert has no biases");
}

static void layers_with_experts_are_counted_or_listed(void **state) {
    (void)state;
    static const char *const words[][2] = {{"1", "1111"},
                                           {"2", "1010"},
                                           {"([0]*1+[1]*3)", "0111"},
                                           {"[0,1]*2", "0101"},
                                           {"[0,1,1,0]", "0110"},
                                           {"[1]+[0]*3", "1000"},
                                           {"([0]+[1])*2", "0101"},
                                           {"([1]*1+([0]*2+[1])*1)*1", "1001"},
                                           {"[0]*0+([0,1,]*1*2)", "0101"},
                                           {"((([1]))*2+[0])*1+[0]", "1100"}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        char line[512];
        mt_run_options o;
        snprintf(line, sizeof line, EXPERTS "--moe-layer-freq %s", words[i][0]);
        expect_good(&o, line);
        assert_string_equal(o.stack.moe_layers, words[i][1]);
        mt_options_free(&o);
    }
    static const char *const bad[] = {"0",          "[0,1]",        "[1]*5",  "[2]*4",
                                      "[1]*4]",     "[]*4",         "[1]*-1", "x",
                                      "([1]*4",     "[1]*4)",       "[1]*2*", "[1]*9223372036854775807*4",
                                      "[1]([1]*3)", "([0]+[1]*2)*2"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char line[512];
        snprintf(line, sizeof line, EXPERTS "--moe-layer-freq %s", bad[i]);
        expect_error(line, "--moe-layer-freq expects a number, or 0 or 1 for each of the 4 layers");
    }
    expect_error(EXPERTS "--moe-layer-freq [0]*4", "--moe-layer-freq [0]*4 gives no layer experts");
}

/* DeepSeek-V3 has its first layers without experts. */
static void a_model_cut_to_its_dense_layers_is_dense(void **state) {
    (void)state;
    mt_run_options o;
    expect_good(&o, "--hf-config tests/golden/hf/deepseek_v3/config.json --num-layers 1 --mock-data --seq-length 16 "
                    "--train-iters 10 --lr 1e-3");
    assert_null(o.stack.moe_layers);
    assert_int_equal(o.stack.num_experts, 0);
    mt_options_free(&o);
}

static void layers_without_an_mlp_do_not_split_its_width(void **state) {
    (void)state;
    mt_run_options o;
    mt_error error;
    const char *line = EXPERTS "--hidden-size 8 --num-attention-heads 2 --ffn-hidden-size 15 --moe-ffn-hidden-size 4 "
                               "--tensor-model-parallel-size 2 --sequence-parallel";
    if (parse(&o, MT_PROGRAM_TRAIN, 2, line, &error)) fail_msg("%s", error.text);
    mt_options_free(&o);
    expect_error_of(MT_PROGRAM_TRAIN, 2,
                    EXPERTS "--ffn-hidden-size 15 --moe-ffn-hidden-size 4 --tensor-model-parallel-size 2 "
                            "--sequence-parallel --moe-layer-freq [1,1,1,0]",
                    "--ffn-hidden-size 15 must be a multiple of --tensor-model-parallel-size 2");
}

/* Defaults and refusals are Megatron's; full recomputation without a method is uniform, one layer a unit. */
static void fp8_follows_megatron(void **state) {
    (void)state;
    static const char *const refused[][2] = {
        {"--fp8-recipe tensorwise", "--fp8-recipe needs --fp8-format"},
        {"--fp8-format hybrid --fp8-recipe current", "--fp8-recipe expects delayed|tensorwise|blockwise|mxfp8"},
        {"--fp8-format e5m2", "--fp8-format expects none|e4m3|hybrid"},
        {"--fp8-margin 1", "--fp8-margin needs --fp8-format"},
        {"--fp8-amax-history-len 2", "--fp8-amax-history-len needs --fp8-format"},
        {"--fp8-amax-compute-algo max", "--fp8-amax-compute-algo needs --fp8-format"},
        {"--tp-only-amax-red", "--tp-only-amax-red needs --fp8-format"},
        {"--fp8-format hybrid --fp8-margin 17", "--fp8-margin must be in [0,16], got 17"},
        {"--fp8-format hybrid --fp8-recipe tensorwise --fp8-margin 1", "--fp8-margin needs --fp8-recipe delayed"},
        {"--fp8-format e4m3 --fp8-recipe blockwise --fp8-amax-history-len 4", "needs --fp8-recipe delayed"},
        {"--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-amax-compute-algo max", "needs --fp8-recipe delayed"},
        {"--fp8-format e4m3 --fp8-recipe tensorwise --tp-only-amax-red", "needs --fp8-recipe delayed"},
        {"--fp8-format hybrid --fp8-amax-history-len 0", "--fp8-amax-history-len must be in [1,65536], got 0"},
        {"--no-fp8-wgrad", "--no-fp8-wgrad needs --fp8-format"},
        {"--fp8-format hybrid --num-layers-at-start-in-bf16 2",
         "--num-layers-at-start-in-bf16 needs --first-last-layers-bf16"},
        {"--fp8-format hybrid --first-last-layers-bf16 --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 1",
         "leave no layer of 2 in fp8; lower them or leave out --first-last-layers-bf16"},
        {"--fp8-format hybrid --num-experts 4 --no-moe-grouped-gemm",
         "--fp8-format and --no-moe-grouped-gemm exclude each other"},
        {"--fp8-format hybrid --fp8-param-gather",
         "--fp8-param-gather needs --data-parallel-sharding-strategy optim|optim_grads|optim_grads_params"},
        {"--fp8-param --use-distributed-optimizer", "needs --fp8-format"},
        {"--fp8-format hybrid --fp8-param-gather --use-distributed-optimizer --tp-only-amax-red",
         "--fp8-param-gather and --tp-only-amax-red exclude each other"},
        {"--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --use-distributed-optimizer",
         "--fp8-param-gather needs --fp8-recipe delayed|tensorwise|blockwise"},
        {"--fp4 e2m1", "is not supported (fp4,"},
        {"--fp8-dot-product-attention", "is not supported"},
        {"--fp8-output-proj", "is not supported"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        char line[512];
        snprintf(line, sizeof line, RUN "%s", refused[i][0]);
        expect_error(line, refused[i][1]);
    }
    mt_run_options o;
    expect_good(&o, RUN "--fp8-format hybrid");
    assert_int_equal(o.stack.fp8_format, MT_FP8_HYBRID);
    assert_int_equal(o.stack.fp8_recipe, MT_FP8_DELAYED);
    assert_int_equal(o.stack.fp8_amax_history_len, 1);
    assert_int_equal(o.stack.fp8_amax_compute_algo, MT_AMAX_MOST_RECENT);
    assert_int_equal(o.stack.fp8_margin, 0);
    assert_true(o.stack.fp8_wgrad && !o.stack.tp_only_amax_red && !o.stack.first_last_layers_bf16);
    mt_options_free(&o);
    expect_good(&o, RUN "--fp8 e4m3 --fp8-recipe mxfp8 --no-fp8-wgrad"); // Megatron's other name
    assert_int_equal(o.stack.fp8_format, MT_FP8_E4M3);
    assert_int_equal(o.stack.fp8_recipe, MT_FP8_MXFP8);
    assert_false(o.stack.fp8_wgrad);
    mt_options_free(&o);
    expect_good(&o, RUN "");
    assert_int_equal(o.stack.fp8_format, MT_FP8_OFF);
    mt_options_free(&o);
}

static void fp8_needs_a_gpu_that_has_it(void **state) {
    (void)state;
    mt_run_options o;
    mt_error error;
    const mt_limits no_mxfp8 = {.no_mxfp8 = true}, no_fp8 = {.no_fp8 = true};
    expect_good(&o, RUN "");
    assert_int_equal(mt_options_check_limits(&o.stack, &no_fp8, &error), 0);
    mt_options_free(&o);
    expect_good(&o, RUN "--fp8-format e4m3 --fp8-recipe mxfp8");
    assert_int_equal(mt_options_check_limits(&o.stack, &no_mxfp8, &error), -1);
    assert_non_null(strstr(error.text, "--fp8-recipe mxfp8 runs on the CPU only so far"));
    assert_int_equal(mt_options_check_limits(&o.stack, &no_fp8, &error), -1);
    assert_non_null(strstr(error.text, "--fp8-format needs a GPU of compute capability 8.9"));
    mt_options_free(&o);
}

/* cuBLASLt multiplies with a scale for a matrix from 8.9 on, by blocks on 9.0 alone. */
static void fp8_recipes_follow_the_compute_capability(void **state) {
    (void)state;
    static const struct {
        int capability, kernels;
        bool tensorwise, blockwise;
    } gpus[] = {{75, 75, false, false},  {80, 80, false, false},  {86, 86, false, false}, {89, 89, true, false},
                {90, 90, true, true},    {90, 80, true, true},    {90, 75, false, false}, {100, 100, true, false},
                {103, 103, true, false}, {120, 120, true, false}, {121, 120, true, false}};
    for (size_t i = 0; i < sizeof gpus / sizeof *gpus; i++) {
        mt_limits limits = {0};
        mt_error error;
        bool has_fp8 = mt_cuda_has_fp8(gpus[i].capability, gpus[i].kernels);
        mt_cuda_set_limits(&limits, 99 * 1024, has_fp8, has_fp8 && mt_cuda_has_fp8_blocks(gpus[i].capability), false);
        for (int recipe = 0; recipe < 3; recipe++) {
            static const char *const names[] = {"delayed", "tensorwise", "blockwise"};
            char line[200];
            mt_run_options o;
            snprintf(line, sizeof line, RUN "--fp8-format hybrid --fp8-recipe %s", names[recipe]);
            expect_good(&o, line);
            bool takes = recipe == 2 ? gpus[i].blockwise : gpus[i].tensorwise;
            assert_int_equal(mt_options_check_limits(&o.stack, &limits, &error), takes ? 0 : -1);
            if (!takes) assert_non_null(strstr(error.text, "needs a GPU of compute capability "));
            mt_options_free(&o);
        }
    }
}

static void a_memory_limit_is_a_number_with_a_unit(void **state) {
    (void)state;
    static const struct {
        const char *text;
        int64_t bytes;
    } good[] = {{"15GiB", (int64_t)15 << 30}, {"1.5GiB", (int64_t)3 << 29}, {"16GB", 16000000000}, {"1MiB", 1 << 20}};
    static const char *const bad[] = {"15", "15gib", "GiB", "-1GiB", "0.5MiB", "nanGiB", "1e30GiB", "1 GiB"};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        char line[200];
        mt_run_options o;
        snprintf(line, sizeof line, RUN "--memory-limit %s", good[i].text);
        expect_good(&o, line);
        assert_int_equal(o.stack.memory_limit, good[i].bytes);
        mt_options_free(&o);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        mt_run_options o = {.memory_limit = (char *)bad[i]};
        mt_error error;
        int64_t bytes;
        assert_int_equal(mt_options_memory_limit(&o, &bytes, &error), -1);
        assert_non_null(strstr(error.text, "GiB, MiB, GB or MB"));
    }
}

static void recomputation_follows_megatron(void **state) {
    (void)state;
    static const char *const refused[][2] = {
        {"--recompute-method block", "--recompute-method needs --recompute-granularity full"},
        {"--recompute-num-layers 2 --recompute-activations", "-num-layers needs --recompute-granularity full"},
        {"--recompute-modules mlp", "--recompute-modules needs --recompute-granularity selective"},
        {"--recompute-granularity full --recompute-modules mlp", "needs --recompute-granularity selective"},
        {"--recompute-granularity full --recompute-activations", "exclude each other"},
        {"--recompute-granularity selective --recompute-modules mla_up_proj", "needs --multi-latent-attention"},
        {"--recompute-granularity selective --recompute-modules mlp,attention", "some of core_attn|moe_act|"},
        {"--recompute-granularity selective --recompute-modules ,", "--recompute-modules expects some of core_attn|"},
        {"--recompute-granularity selective --recompute-modules , ,", "got none: ','"},
        {"--recompute-granularity half", "--recompute-granularity expects none|full|selective"},
        {"--moe-layer-recompute", "--moe-layer-recompute needs --num-experts"},
        {"--num-experts 4 --moe-layer-recompute --recompute-granularity full", "exclude each other"},
        {"--num-experts 4 --no-moe-grouped-gemm --recompute-activations --recompute-modules moe_act",
         "--recompute-modules moe_act and --no-moe-grouped-gemm exclude each other"},
        {"--distribute-saved-activations", "--distribute-saved-activations needs --recompute-granularity full"},
        {"--recompute-granularity full --distribute-saved-activations", "needs --tensor-model-parallel-size"},
        {"--recompute-granularity full --distribute-saved-activations --tensor-model-parallel-size 2 --num-experts 4",
         "--distribute-saved-activations is not supported with --num-experts"},
    };
    static const struct {
        const char *words;
        mt_recompute_granularity granularity;
        mt_recompute_method method;
        int64_t num_layers;
        unsigned modules;
    } accepted[] = {
        {"", MT_RECOMPUTE_NONE, MT_RECOMPUTE_DEFAULT, 0, 0},
        {"--recompute-granularity full", MT_RECOMPUTE_FULL, MT_RECOMPUTE_UNIFORM, 1, 0},
        {"--recompute-granularity full --recompute-method block --recompute-num-layers 3", MT_RECOMPUTE_FULL,
         MT_RECOMPUTE_BLOCK, 3, 0},
        {"--recompute-activations", MT_RECOMPUTE_SELECTIVE, MT_RECOMPUTE_DEFAULT, 0, MT_MODULE_CORE_ATTN},
        {"--recompute-granularity selective --recompute-modules mlp,layernorm", MT_RECOMPUTE_SELECTIVE,
         MT_RECOMPUTE_DEFAULT, 0, MT_MODULE_MLP | MT_MODULE_LAYERNORM},
        {"--recompute-activations --recompute-modules moe_act layernorm", MT_RECOMPUTE_SELECTIVE, MT_RECOMPUTE_DEFAULT,
         0, MT_MODULE_MOE_ACT | MT_MODULE_LAYERNORM},
        {"--num-experts 2 --swiglu --disable-bias-linear --moe-layer-recompute", MT_RECOMPUTE_SELECTIVE,
         MT_RECOMPUTE_DEFAULT, 0, MT_MODULE_MOE},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        char line[512];
        snprintf(line, sizeof line, RUN "%s", refused[i][0]);
        expect_error(line, refused[i][1]);
    }
    for (size_t i = 0; i < sizeof accepted / sizeof *accepted; i++) {
        char line[512];
        mt_run_options o;
        snprintf(line, sizeof line, RUN "%s", accepted[i].words);
        expect_good(&o, line);
        assert_int_equal(o.stack.recompute_granularity, accepted[i].granularity);
        assert_int_equal(o.stack.recompute_method, accepted[i].method);
        assert_int_equal(o.stack.recompute_num_layers, accepted[i].num_layers);
        assert_int_equal(o.stack.recompute_modules, accepted[i].modules);
        mt_options_free(&o);
    }
}

#define OFFLOAD "--fine-grained-activation-offloading --offload-modules "

/* Modules and refusals are Megatron's; mlp is one more. */
static void offloading_follows_megatron(void **state) {
    (void)state;
    static const char *const refused[][2] = {
        {"--fine-grained-activation-offloading", "--fine-grained-activation-offloading needs --offload-modules"},
        {"--offload-modules core_attn", "--offload-modules needs --fine-grained-activation-offloading"},
        {OFFLOAD "attn_proj", "--offload-modules attn_proj needs --offload-modules core_attn"},
        {OFFLOAD ",", "--offload-modules expects some of attn_norm|qkv_linear|core_attn|"},
        {OFFLOAD "core_attn,router", "expects some of attn_norm|qkv_linear|core_attn|attn_proj|"},
    };
    static const struct {
        const char *words;
        unsigned modules;
    } accepted[] = {
        {"", 0},
        {OFFLOAD "core_attn", MT_OFFLOAD_CORE_ATTN},
        {OFFLOAD "core_attn attn_proj", MT_OFFLOAD_CORE_ATTN | MT_OFFLOAD_ATTN_PROJ},
        {OFFLOAD "attn_norm,qkv_linear,mlp_norm", MT_OFFLOAD_ATTN_NORM | MT_OFFLOAD_QKV_LINEAR | MT_OFFLOAD_MLP_NORM},
        {OFFLOAD "expert_fc1 moe_act mlp", MT_OFFLOAD_EXPERT_FC1 | MT_OFFLOAD_MOE_ACT | MT_OFFLOAD_MLP},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        char line[512];
        snprintf(line, sizeof line, RUN "%s", refused[i][0]);
        expect_error(line, refused[i][1]);
    }
    for (size_t i = 0; i < sizeof accepted / sizeof *accepted; i++) {
        char line[512];
        mt_run_options o;
        snprintf(line, sizeof line, RUN "%s", accepted[i].words);
        expect_good(&o, line);
        assert_int_equal(o.stack.fine_grained_activation_offloading, accepted[i].modules != 0);
        assert_int_equal(o.stack.offload_modules, accepted[i].modules);
        mt_options_free(&o);
    }
}

#define SPARSE_LIKE                                                                                                    \
    "--hf-config tests/golden/hf/glm_moe_dsa_shared/config.json --mock-data --seq-length 16 --train-iters 10 --lr "    \
    "1e-3 "

static void sparse_attention_that_cannot_be_is_refused(void **state) {
    (void)state;
    mt_run_options o;
    expect_good(&o, SPARSE_LIKE "--dsa-indexer-loss-coeff 0.1 --dsa-indexer-use-sparse-loss");
    for (int64_t i = 0; i < 4; i++) {
        mt_layer_kind kind = mt_layer_kind_of(&o.stack, i);
        assert_true(kind.mixer == MT_MIXER_SPARSE_ATTENTION && kind.shares_indices == (i % 2 == 1));
    }
    mt_options_free(&o);
    expect_error_of(MT_PROGRAM_TRAIN, 2, SPARSE_LIKE "--context-parallel-size 2 --cp-comm-type p2p",
                    "dsa with --context-parallel-size 2 needs --cp-comm-type all_gather");
    expect_error_of(MT_PROGRAM_TRAIN, 2, SPARSE_LIKE "--context-parallel-size 2 --cp-comm-type a2a",
                    "dsa with --context-parallel-size 2 needs --cp-comm-type all_gather");
    expect_error_of(MT_PROGRAM_TRAIN, 4, SPARSE_LIKE "--pipeline-model-parallel-size 4",
                    "pipeline stage 1 begins with layer 1, which has no indexer");
    expect_error_of(MT_PROGRAM_TRAIN, 2,
                    SPARSE_LIKE "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Ettt|tL",
                    "pipeline stage 1 begins with layer 3, which has no indexer");
    expect_error(SPARSE_LIKE "--lora-rank 2 --lora-target all-linear --dsa-indexer-loss-coeff 1",
                 "trains the indexer, which --lora-rank freezes");
    expect_error(SPARSE_LIKE "--dsa-indexer-use-sparse-loss",
                 "--dsa-indexer-use-sparse-loss needs --dsa-indexer-loss-coeff");
    expect_error(RUN "--experimental-attention-variant dsa", "dsa needs --multi-latent-attention and --q-lora-rank");
    expect_error(SPARSE_LIKE "--dsa-indexer-head-dim 4", "--dsa-indexer-head-dim 4 is less than --qk-pos-emb-head-dim");
    expect_error(RUN "--dsa-indexer-topk 4", "--dsa-indexer-topk needs --experimental-attention-variant dsa");
}

static void experts_that_cannot_be_are_refused(void **state) {
    (void)state;
    static const char *const words[][2] = {
        {"--moe-router-topk 9", "--moe-router-topk 9 must be at most --num-experts 8"},
        {"--moe-router-topk 1", "--moe-router-topk 1 needs --moe-router-pre-softmax"},
        {"--moe-router-enable-expert-bias --moe-router-load-balancing-type sinkhorn",
         "--moe-router-enable-expert-bias"},
        {"--moe-router-num-groups 4", "--moe-router-num-groups needs --moe-router-group-topk"},
        {"--moe-router-num-groups 3 --moe-router-group-topk 1",
         "--num-experts 8 must be a multiple of --moe-router-num-groups 3"},
        {"--moe-router-num-groups 8 --moe-router-group-topk 1",
         "is more than the 1 experts of --moe-router-group-topk"},
        {"--moe-pad-expert-input-to-capacity", "needs --moe-expert-capacity-factor"},
        {"--moe-token-drop-policy position", "needs --moe-expert-capacity-factor"},
        {"--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
         "-coeff needs --moe-router-load-balancing-type aux_loss|"},
        {"--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1",
         "needs --moe-router-load-balancing-type aux_loss|"},
        {"--moe-router-load-balancing-type sinkhorn --moe-router-topk 1 --moe-router-score-function softmax "
         "--moe-router-pre-softmax",
         "sinkhorn with --moe-router-topk 1 needs --moe-router-score-function sigmoid"},
        {"--moe-router-load-balancing-type sinkhorn --moe-router-score-function sqrtsoftplus",
         "sinkhorn takes no --moe-router-score-function sqrtsoftplus"},
        {"--moe-router-load-balancing-type sinkhorn --moe-router-score-function softmax",
         "sinkhorn with --moe-router-topk 2 needs --moe-router-pre-soft"},
        {"--moe-router-load-balancing-type sinkhorn --moe-router-pre-softmax --moe-expert-capacity-factor 1",
         "sinkhorn and --moe-expert-capacity-factor exclude each other"},
        {"--moe-router-load-balancing-type aux_loss aux_loss", "names aux_loss twice"},
        {"--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1",
         "--moe-aux-loss-coeff has 1 numbers, and --moe-router-load-balancing-type names 2 losses"},
        {"--moe-aux-loss-coeff 0.1 0.2", "--moe-aux-loss-coeff has 2 numbers, and --moe-router-load-balancing-type "
                                         "names 1 losses"},
        {"--moe-aux-loss-coeff 0.1 -2 --moe-router-load-balancing-type aux_loss seq_aux_loss",
         "--moe-aux-loss-coeff must be in [0,1e6]"},
        {"--moe-aux-loss-coeff 0.1 0.2 --moe-router-load-balancing-type aux_loss sinkhorn", "leave out the others"},
        {"--moe-router-load-balancing-type quantile", "expects none|aux_loss|"},
        {"--moe-router-load-balancing-type quantile_balancing --moe-aux-loss-coeff 0.1",
         "needs --moe-router-load-balancing-type aux_loss|"},
        {"--moe-router-load-balancing-type quantile_balancing --moe-router-topk 8",
         "needs a --moe-router-topk below --num-experts 8, not 8"},
        {"--moe-router-load-balancing-type quantile_balancing --moe-router-enable-expert-bias",
         "quantile_balancing has a bias of its own"},
        {"--moe-router-load-balancing-type quantile_balancing --moe-router-topk 3 --seq-length 12 --lr 1e-3 "
         "--train-iters 2",
         "of the 36 choices of a micro-batch"},
        {"--moe-router-load-balancing-type quantile_balancing --moe-router-num-groups 4 --moe-router-group-topk 2",
         "--moe-router-num-groups"},
        {"--moe-router-quantile-balancing-ema 0.5", "needs --moe-router-load-balancing-type quantile_balancing"},
        {"--moe-shared-expert-gate", "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size"},
        {"--expert-model-parallel-size 3", "--num-experts 8 must be a multiple of --expert-model-parallel-size 3"},
        {"--expert-model-parallel-size 2",
         "the number of ranks 1 must be a multiple of --expert-tensor-parallel-size x"},
    };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        char line[512];
        snprintf(line, sizeof line, EXPERTS "%s", words[i][0]);
        expect_error(line, words[i][1]);
    }
    expect_error("--num-layers 4 --hidden-size 8 --num-attention-heads 2 --vocab-size 32 --seq-length 8 --mock-data "
                 "--train-iters 1 --lr 1 --moe-router-topk 3",
                 "--moe-router-topk needs --num-experts");
    expect_error("--num-layers 4 --hidden-size 8 --num-attention-heads 2 --vocab-size 32 --seq-length 8 --mock-data "
                 "--train-iters 1 --lr 1 --no-moe-permute-fusion",
                 "--no-moe-permute-fusion needs --num-experts");
}

static void options_win_over_a_shape_but_not_over_weights(void **state) {
    (void)state;
    mt_run_options options;
    expect_good(&options, "--hf-config data/configs/llama3-8b.json --num-layers 4 --rotary-base 20000 --mock-data "
                          "--hidden-dropout 0.25 --seq-length 8 --train-iters 1 --lr 1");
    assert_int_equal(options.stack.num_layers, 4);
    assert_int_equal(options.stack.hidden_size, 4096);
    assert_true(options.stack.rotary_base == 20000 && options.stack.hidden_dropout == 0.25 &&
                options.stack.attention_dropout == 0);
    mt_options_free(&options);
    const char *run = "--load tests/golden/hf/llama --mock-data --seq-length 8 --train-iters 1 --lr 1";
    char line[300];
    snprintf(line, sizeof line, "%s --num-layers 3", run);
    expect_error(line, "--num-layers is 3, but the weights have 4 (tests/golden/hf/llama/config.json)");
    snprintf(line, sizeof line, "%s --qk-layernorm", run);
    expect_error(line, "--qk-layernorm is true, but the weights have false");
    snprintf(line, sizeof line,
             "%s --num-layers 4 --kv-channels 8 --swiglu --disable-bias-linear "
             "--max-position-embeddings 128 --attention-dropout 0.5",
             run);
    expect_good(&options, line);
    assert_true(options.stack.max_position_embeddings == 128 && options.stack.attention_dropout == 0.5);
    mt_options_free(&options);
    expect_error("--load tests/golden/hf/gpt2 --max-position-embeddings 128 --mock-data --seq-length 8 --train-iters 1 "
                 "--lr 1",
                 "--max-position-embeddings is 128, but the weights have 64");
}

/* A resumed command may still name the model that it began with. */
static void the_model_of_hf_config_must_be_that_of_load(void **state) {
    (void)state;
    mt_run_options options;
    static const char *const names[] = {"gpt2", "llama", "qwen3", "mixtral", "qwen2_moe", "deepseek_v3"};
    char line[400];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(line, sizeof line,
                 "--load tests/golden/hf/%s --hf-config tests/golden/hf/%s/config.json --mock-data --seq-length 8 "
                 "--train-iters 1 --lr 1",
                 names[i], names[i]);
        expect_good(&options, line);
        mt_options_free(&options);
    }
    expect_error(
        "--load tests/golden/hf/llama --hf-config tests/golden/hf/qwen3/config.json --mock-data --seq-length 8 "
        "--train-iters 1 --lr 1",
        "--hf-config tests/golden/hf/qwen3/config.json: has --");
    expect_error(
        "--load tests/golden/hf/llama --hf-config tests/golden/hf/qwen3/config.json --mock-data --seq-length 8 "
        "--train-iters 1 --lr 1",
        "but the model of --load tests/golden/hf/llama has");
}

static void the_latest_checkpoint_of_a_folder_is_described(void **state) {
    (void)state;
    mt_run_options options;
    char *folder = make_folder(), inner[200], line[300];
    char *text = read_text("tests/golden/hf/qwen3/config.json");
    snprintf(inner, sizeof inner, "%s/iter_0000007", folder);
    assert_int_equal(mkdir(inner, 0700), 0);
    char *latest = write_file(folder, "latest_checkpointed_iteration.txt", "7\n");
    char *config = write_file(inner, "config.json", text);
    snprintf(line, sizeof line, "--load %s --mock-data --seq-length 8 --train-iters 1 --lr 1", folder);
    expect_good(&options, line);
    assert_int_equal(options.stack.hf_family, MT_HF_QWEN3);
    mt_options_free(&options);
    remove_file(config), remove_file(latest), remove_folder(mt_strdup(inner)), remove_folder(folder);
    free(text);
}

/* Llama's shape with something more, or something else (a later key may not repeat an earlier one). */
#define LLAMA_SIZES                                                                                                    \
    "\"num_hidden_layers\": 2, \"hidden_size\": 64, \"intermediate_size\": 128, \"num_attention_heads\": 4, "          \
    "\"max_position_embeddings\": 4096, \"vocab_size\": 100"
#define LLAMA "{\"model_type\": \"llama\", " LLAMA_SIZES
#define QWEN2 "{\"model_type\": \"qwen2\", \"num_key_value_heads\": 2, " LLAMA_SIZES

static int read_config(mt_run_options *options, const char *json, mt_error *error) {
    mt_options_default(options);
    options->mock_data = true;
    options->stack.seq_length = options->stack.train_iters = 1;
    options->stack.lr = 1;
    if (mt_options_read_hf_config(options, json, (int64_t)strlen(json), "config.json", error)) return -1;
    return mt_options_finish(options, MT_PROGRAM_TRAIN, 1, error);
}

static void expect_config(mt_run_options *options, const char *json) {
    mt_error error;
    if (read_config(options, json, &error)) fail_msg("%s\n  gave: %s", json, error.text);
}

static void expect_config_error(const char *json, const char *expected) {
    mt_run_options options;
    mt_error error = {""};
    if (read_config(&options, json, &error) == 0) fail_msg("%s\n  was accepted", json);
    if (!strstr(error.text, expected)) fail_msg("%s\n  gave: %s\n  not: %s", json, error.text, expected);
    mt_options_free(&options);
}

static void rope_is_read_in_both_forms(void **state) {
    (void)state;
    mt_run_options o;
    expect_config(&o, LLAMA ", \"rope_theta\": 5e5, \"rope_scaling\": {\"type\": \"linear\", \"factor\": 2.5}}");
    assert_int_equal(o.stack.rope_scaling_type, MT_ROPE_SCALING_LINEAR);
    assert_true(o.stack.rope_scaling_factor == 2.5 && o.stack.rotary_base == 5e5);
    mt_options_free(&o);
    expect_config(&o,
                  LLAMA ", \"rope_parameters\": {\"rope_theta\": 7, \"rope_type\": \"default\"}, \"rope_theta\": 8}");
    assert_int_equal(o.stack.rope_scaling_type, MT_ROPE_SCALING_NONE);
    assert_true(o.stack.rotary_base == 7);
    mt_options_free(&o);
    expect_config(&o, LLAMA ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4, "
                            "\"original_max_position_embeddings\": 1024, \"beta_fast\": 16, \"mscale\": 1, "
                            "\"mscale_all_dim\": 1}}");
    assert_int_equal(o.stack.rope_scaling_type, MT_ROPE_SCALING_YARN);
    assert_true(o.stack.yarn_beta_fast == 16 && o.stack.yarn_beta_slow == 1 && o.stack.yarn_attention_factor == 1);
    assert_int_equal(o.stack.original_max_position_embeddings, 1024);
    mt_options_free(&o);
    expect_config(&o, LLAMA ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4}}");
    assert_int_equal(o.stack.original_max_position_embeddings, 4096);
    assert_true(o.stack.yarn_attention_factor > 1.138629 && o.stack.yarn_attention_factor < 1.13863); // 0.1 ln 4 + 1
    mt_options_free(&o);
    expect_config_error(LLAMA ", \"rope_scaling\": {\"rope_type\": \"dynamic\", \"factor\": 4}}",
                        "RoPE of type \"dynamic\" is not supported; default, linear, llama3 and yarn are");
    expect_config_error(LLAMA ", \"rope_scaling\": {\"type\": \"longrope\"}}", "longrope");
    expect_config_error(LLAMA ", \"rope_scaling\": {\"type\": \"linear\"}}", "needs a \"factor\"");
    expect_config_error(LLAMA ", \"rope_scaling\": {\"type\": \"linear\", \"factor\": 0}}", "\"factor\" is 0");
    expect_config_error(LLAMA ", \"rope_scaling\": [1]}", "must be an object");
    // rope_scaling replaces rope_parameters as a whole; rope_theta beside both holds where it is absent
    const char *both = LLAMA ", \"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 4}, \"rope_parameters\": "
                             "{\"rope_type\": \"yarn\", \"factor\": 2, \"rope_theta\": 7}%s}";
    char json[1000];
    snprintf(json, sizeof json, both, "");
    expect_config(&o, json);
    assert_true(o.stack.rope_scaling_type == MT_ROPE_SCALING_LINEAR && o.stack.rope_scaling_factor == 4 &&
                o.stack.rotary_base == 10000);
    mt_options_free(&o);
    snprintf(json, sizeof json, both, ", \"rope_theta\": 8");
    expect_config(&o, json);
    assert_true(o.stack.rope_scaling_type == MT_ROPE_SCALING_LINEAR && o.stack.rotary_base == 8);
    mt_options_free(&o);
    expect_config(&o, LLAMA ", \"rope_scaling\": {}, \"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 2, "
                            "\"original_max_position_embeddings\": 512, \"rope_theta\": 7}, "
                            "\"original_max_position_embeddings\": 256}");
    assert_true(o.stack.rope_scaling_type == MT_ROPE_SCALING_YARN && o.stack.rotary_base == 7);
    assert_int_equal(o.stack.original_max_position_embeddings, 256);
    mt_options_free(&o);
    expect_config(&o, LLAMA ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 2}}");
    assert_int_equal(o.stack.original_max_position_embeddings, 4096);
    mt_options_free(&o);
    expect_config_error(LLAMA ", \"rope_parameters\": {\"full_attention\": {\"rope_type\": \"default\"}}}",
                        "parameters of its own for \"full_attention\"");
    expect_config(&o, LLAMA ", \"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 2, \"truncate\": false}}");
    assert_false(o.stack.yarn_correction_range_round_to_int);
    mt_options_free(&o);
    expect_config(&o, LLAMA ", \"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 2}}");
    assert_true(o.stack.yarn_correction_range_round_to_int);
    mt_options_free(&o);
}

/* Frequency of pair i in modeling_rope_utils.py of transformers: find_correction_range and linear_ramp_factor. */
static double yarn_frequency(int i, double dim, double base, double factor, double context, bool truncate) {
    double low = dim * log(context / (32 * 2 * M_PI)) / (2 * log(base));
    double high = dim * log(context / (1 * 2 * M_PI)) / (2 * log(base));
    if (truncate) low = floor(low), high = ceil(high);
    low = fmax(low, 0), high = fmin(high, dim - 1);
    if (low == high) high += 0.001;
    double ramp = fmax(0, fmin(1, (i - low) / (high - low))), position = pow(base, 2 * i / dim);
    return 1 / (factor * position) * ramp + 1 / position * (1 - ramp);
}

static void yarn_without_rounded_ranges_is_that_of_transformers(void **state) {
    (void)state;
    static const double shapes[][4] = {{64, 150000, 32, 4096}, {16, 150000, 4, 4096}, {128, 10000, 4, 2048}};
    for (int k = 0; k < 6; k++) {
        const double *s = shapes[k / 2];
        bool truncate = k % 2 == 0, differs = false;
        char json[600];
        mt_run_options o;
        snprintf(json, sizeof json,
                 LLAMA ", \"rope_parameters\": {\"rope_type\": \"yarn\", \"rope_theta\": %.17g, \"factor\": %g, "
                       "\"beta_fast\": 32, \"beta_slow\": 1, \"original_max_position_embeddings\": %g%s}}",
                 s[1], s[2], s[3], truncate ? "" : ", \"truncate\": false");
        expect_config(&o, json);
        assert_true(o.stack.yarn_correction_range_round_to_int == truncate);
        for (int i = 0; i < (int)s[0] / 2; i++) {
            double want = yarn_frequency(i, s[0], s[1], s[2], s[3], truncate);
            double got = mt_rope_frequency(&o.stack, MT_ROPE_MODEL, i, (int64_t)s[0]);
            assert_true(fabs(got - want) <= 1e-12 * want);
            differs |= fabs(want - yarn_frequency(i, s[0], s[1], s[2], s[3], !truncate)) > 1e-6 * want;
        }
        assert_true(differs);
        mt_options_free(&o);
    }
}

static void expect_window(const char *json, int64_t window) {
    mt_run_options o;
    expect_config(&o, json);
    assert_int_equal(o.stack.window_size, window);
    mt_options_free(&o);
}

static void windows_are_read_for_each_layer(void **state) {
    (void)state;
    mt_run_options o;
    const char *mistral = "{\"model_type\": \"mistral\", \"num_key_value_heads\": 2, " LLAMA_SIZES "%s}";
    char json[1000];
    snprintf(json, sizeof json, mistral, ", \"sliding_window\": 17");
    expect_config(&o, json);
    assert_int_equal(o.stack.window_size, 17);
    assert_int_equal(o.stack.hf_family, MT_HF_MISTRAL);
    mt_options_free(&o);
    snprintf(json, sizeof json, mistral, ", \"sliding_window\": null");
    expect_window(json, 0);
    expect_window(QWEN2 ", \"sliding_window\": 17}", 0); // use_sliding_window is false where it is not given
    expect_window(QWEN2 ", \"sliding_window\": 0, \"use_sliding_window\": false}", 0); // as transformers 5 writes it
    expect_config_error(QWEN2 ", \"sliding_window\": 0, \"use_sliding_window\": true}", "\"sliding_window\" is 0");
    expect_config_error(QWEN2 ", \"sliding_window\": \"0\"}", "\"sliding_window\" must be a whole number");
    expect_window(QWEN2 ", \"sliding_window\": 17, \"use_sliding_window\": true, \"max_window_layers\": 0}", 17);
    expect_window(QWEN2 ", \"sliding_window\": 17, \"use_sliding_window\": true, \"max_window_layers\": 2}", 0);
    expect_config(&o, QWEN2 ", \"sliding_window\": 17, \"use_sliding_window\": true, \"max_window_layers\": 1}");
    assert_int_equal(mt_layer_kind_of(&o.stack, 0).window, 0);
    assert_int_equal(mt_layer_kind_of(&o.stack, 1).window, 17);
    mt_options_free(&o);
    expect_config(&o, QWEN2 ", \"sliding_window\": 17, \"use_sliding_window\": true, \"layer_types\": "
                            "[\"full_attention\", \"sliding_attention\"]}");
    assert_int_equal(mt_layer_kind_of(&o.stack, 0).window, 0);
    assert_int_equal(mt_layer_kind_of(&o.stack, 1).window, 17);
    mt_options_free(&o);
    expect_config_error(QWEN2
                        ", \"max_window_layers\": \"2\", \"layer_types\": [\"full_attention\", \"full_attention\"]}",
                        "\"max_window_layers\" must be a whole number, not \"2\"");
    expect_config_error(QWEN2 ", \"rope_theta\": \"1e6\", \"rope_parameters\": {\"rope_theta\": 1e6}}",
                        "\"rope_theta\" must be a number, not \"1e6\"");
    expect_config_error(QWEN2 ", \"use_sliding_window\": true, \"layer_types\": [\"full_attention\"]}",
                        "must list 2 layers");
    expect_config_error(QWEN2 ", \"use_sliding_window\": true, \"layer_types\": [\"linear_attention\", 3]}",
                        "linear_attention");
    static const struct {
        const char *family, *rest;
        int window; // of the first layer; -1: refused
    } cases[] = {
#define SLIDING ", \"use_sliding_window\": true, \"sliding_window\": 17"
#define FULL    "\"layer_types\": [\"full_attention\", \"full_attention\"]"
#define ALL     "\"layer_types\": [\"sliding_attention\", \"sliding_attention\"]"
#define MIXED   "\"layer_types\": [\"sliding_attention\", \"full_attention\"]"
        {"qwen2", SLIDING ", " FULL, 0},
        {"qwen2", SLIDING ", " ALL, 17},
        {"qwen3", SLIDING ", " MIXED, 17},
        {"qwen2", ", \"use_sliding_window\": false, \"sliding_window\": 17, " FULL, 0},
        {"qwen2", ", \"use_sliding_window\": false, \"sliding_window\": 17, " ALL, -1}, // transformers refuses it too
        {"qwen2", ", \"use_sliding_window\": true, \"sliding_window\": null", 0},
        {"qwen3_moe", SLIDING, 17}, // every layer, whatever max_window_layers says
        {"qwen3_moe", SLIDING ", \"max_window_layers\": 2", 17},
        {"qwen3_moe", SLIDING ", " MIXED, -1},
        {"qwen3_moe", SLIDING ", " ALL, 17},
        {"qwen2_moe", SLIDING, 17}, // every second layer before max_window_layers
        {"qwen2_moe", SLIDING ", \"max_window_layers\": 0", 0},
        {"qwen2_moe", SLIDING ", " ALL, 17},
        {"qwen2_moe", SLIDING ", " FULL, 0},
        {"mistral", ", \"sliding_window\": 17, " ALL, 17},
        {"mistral", ", \"sliding_window\": null, " FULL, 0},
        {"mistral", ", \"sliding_window\": 17, " MIXED, -1},
        {"mistral", ", \"sliding_window\": 17, " FULL, -1},
        {"mixtral", ", \"sliding_window\": 17, " MIXED, -1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        snprintf(json, sizeof json,
                 "{\"model_type\": \"%s\", \"num_key_value_heads\": 2, \"num_experts_per_tok\": 2, "
                 "\"num_local_experts\": 4, \"moe_intermediate_size\": 8, \"shared_expert_intermediate_size\": 8, "
                 "" LLAMA_SIZES "%s}",
                 cases[i].family, cases[i].rest);
        if (cases[i].window < 0) {
            expect_config_error(json, "layer");
            continue;
        }
        expect_config(&o, json);
        int64_t window = mt_layer_kind_of(&o.stack, 0).window;
        if (window != cases[i].window) fail_msg("%s\n  gave a window of %lld", json, (long long)window);
        mt_options_free(&o);
    }
}

static void biases_are_read_apart(void **state) {
    (void)state;
    mt_run_options o;
    expect_config(&o, LLAMA ", \"attention_bias\": true, \"mlp_bias\": false}");
    assert_true(o.stack.add_qkv_bias && o.stack.attention_output_bias && !o.stack.mlp_bias && !o.add_bias_linear);
    mt_options_free(&o);
    expect_config(&o, LLAMA ", \"mlp_bias\": true}");
    assert_true(!o.stack.add_qkv_bias && !o.stack.attention_output_bias && o.stack.mlp_bias);
    mt_options_free(&o);
    expect_config(&o, QWEN2 "}");
    assert_true(o.stack.add_qkv_bias && !o.stack.attention_output_bias && !o.stack.mlp_bias);
    mt_options_free(&o);
}

static void bad_configs_are_refused_by_key(void **state) {
    (void)state;
    expect_config_error("", "not JSON");
    expect_config_error("[1]", "not a JSON object");
    expect_config_error("{}", "\"model_type\" is missing");
    expect_config_error("{\"model_type\": 3}", "\"model_type\" must be a string");
    expect_config_error("{\"model_type\": \"llama\"}", "is missing");
    expect_config_error("{\"a\": 1, \"a\": 2}", "duplicate");
    expect_config_error("{\"model_type\": \"llama\", \"vocab_size\": \"many\"}",
                        "\"vocab_size\" must be a whole number");
    expect_config_error("{\"model_type\": \"llama\", \"vocab_size\": -1}", "\"vocab_size\" is -1, must be in [1,");
    expect_config_error("{\"model_type\": \"llama\", \"vocab_size\": 1e3}", "must be a whole number");
    expect_config_error("{\"model_type\": \"llama\", \"vocab_size\": 99999999999999999999}",
                        "\"vocab_size\" must be a whole number, not 1e20");
    expect_config_error(LLAMA ", \"rms_norm_eps\": 2}", "\"rms_norm_eps\" is 2, must be in");
    expect_config_error(LLAMA ", \"rms_norm_eps\": \"x\"}", "\"rms_norm_eps\" must be a number");
    expect_config_error(LLAMA ", \"num_key_value_heads\": 3}", "the 4 heads do not divide into 3 groups");
    expect_config_error(LLAMA ", \"hidden_act\": \"relu\"}",
                        "is not supported; gelu_pytorch_tanh|gelu_new|silu|swish|quick_gelu is");
    expect_config_error(LLAMA ", \"tie_word_embeddings\": 1}", "must be true or false");
    expect_config_error(LLAMA ", \"quantization_config\": {}}", "quantized weights");
    expect_config_error(LLAMA ", \"quantization_config\": {\"quant_method\": \"awq\", \"bits\": 4}}",
                        "of \"quant_method\" awq, \"fmt\" e4m3 are not supported, only fp8 and e4m3; load the fp32");
    expect_config_error(LLAMA ", \"quantization_config\": {\"quant_method\": \"fp8\", \"fmt\": \"e5m2\"}}",
                        "\"fmt\" e5m2 are not supported");
    expect_config_error(LLAMA ", \"quantization_config\": {\"quant_method\": \"fp8\"}}", "\"weight_block_size\" of");
    expect_config_error(LLAMA ", \"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [128]}}",
                        "must be two whole numbers");
    expect_config_error(LLAMA ", \"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [0, 1]}}",
                        "must be two whole numbers");
    expect_config_error(LLAMA ", \"quantization_config\": {\"quant_method\": \"fp8\", \"activation_scheme\": "
                              "\"static\", \"weight_block_size\": [128, 128]}}",
                        "\"activation_scheme\" of \"quantization_config\" is static");
    expect_config_error(LLAMA ", \"partial_rotary_factor\": 0.5}", "partial_rotary_factor");
    expect_config_error(LLAMA ", \"head_dim\": 15}", "must be a multiple of 2");
    expect_config_error(LLAMA ", \"eos_token_id\": \"x\"}", "\"eos_token_id\" is \"x\", must be a token");
    expect_config_error("{\"model_type\": \"megatron\", \"vocab_size\": 9, \"num_query_groups\": -1, "
                        "\"num_attention_heads\": -9223372036854775808}",
                        "must be in");
    expect_config_error("{\"model_type\": \"qwen2\", " LLAMA_SIZES "}", "\"num_key_value_heads\" is missing");
    expect_config_error("{\"model_type\": \"qwen2_moe\", \"num_key_value_heads\": 2, \"num_experts\": 4, "
                        "\"num_experts_per_tok\": 2, \"moe_intermediate_size\": 8, " LLAMA_SIZES "}",
                        "\"shared_expert_intermediate_size\" is missing");
#define DEEPSEEK(heads) "{\"model_type\": \"deepseek_v3\", \"num_key_value_heads\": " heads ", " LLAMA_SIZES
#define LATENTS         ", \"kv_lora_rank\": 8, \"qk_nope_head_dim\": 4, \"qk_rope_head_dim\": 4" DENSE
#define DENSE           ", \"first_k_dense_replace\": 2"
    expect_config_error(DEEPSEEK("4") ", \"q_lora_rank\": null}", "\"kv_lora_rank\" is missing");
    expect_config_error(DEEPSEEK("4") LATENTS "}", "\"v_head_dim\" is missing");
    expect_config_error(DEEPSEEK("2") LATENTS ", \"v_head_dim\": 4}", "every head has its own key and value");
    expect_config_error(DEEPSEEK("4") LATENTS ", \"v_head_dim\": 4, \"attention_bias\": true}",
                        "\"attention_bias\": true is not supported");
    expect_config_error(DEEPSEEK("4") LATENTS ", \"v_head_dim\": 4, \"qk_head_dim\": 99}",
                        "\"qk_head_dim\" is 99, and \"qk_nope_head_dim\" and \"qk_rope_head_dim\" together");
    expect_config_error(DEEPSEEK("4") LATENTS ", \"v_head_dim\": 4, \"head_dim\": \"8\"}",
                        "\"head_dim\" must be a whole number");
    expect_config_error(DEEPSEEK("4") LATENTS ", \"v_head_dim\": 4, \"rope_interleave\": 1}",
                        "\"rope_interleave\" must be true or false");
    const char *negative = DEEPSEEK("4") LATENTS ", \"v_head_dim\": 4, \"q_lora_rank\": -1}";
    expect_config_error(negative, "\"q_lora_rank\" is -1");
}

static void what_a_family_cannot_compute_is_refused(void **state) {
    (void)state;
    const char *gpt2 = "{\"model_type\": \"gpt2\", \"n_layer\": 1, \"n_head\": 2, \"n_embd\": 8, \"n_positions\": 8, "
                       "\"vocab_size\": 9, %s}";
    const char *const cases[][2] = {
        {"\"activation_function\": \"elu\"", "\"activation_function\": \"elu\" is not supported"},
        {"\"scale_attn_by_inverse_layer_idx\": true", "\"scale_attn_by_inverse_layer_idx\": true is not supported"},
        {"\"reorder_and_upcast_attn\": true", "\"reorder_and_upcast_attn\": true is not supported"},
        {"\"scale_attn_weights\": false", "\"scale_attn_weights\": false is not supported"},
        {"\"embd_pdrop\": 0.5", "\"embd_pdrop\" and \"resid_pdrop\" differ"},
        {"\"attn_pdrop\": 1", "\"attn_pdrop\" is 1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char json[500];
        snprintf(json, sizeof json, gpt2, cases[i][0]);
        expect_config_error(json, cases[i][1]);
    }
    expect_config_error("{\"model_type\": \"megatron\", \"vocab_size\": 9, \"hidden_size\": -5}",
                        "--hidden-size must be in");
    expect_config_error("{\"model_type\": \"megatron\", \"vocab_size\": 9, \"swiglu\": 3}", "\"swiglu\" must be true");
}

static void tokens_are_the_first_of_a_list(void **state) {
    (void)state;
    mt_run_options o;
    expect_config(&o, LLAMA ", \"bos_token_id\": 5, \"eos_token_id\": [7, 8]}");
    assert_int_equal(o.bos_token_id, 5);
    assert_int_equal(o.eos_token_id, 7);
    mt_options_free(&o);
    expect_config(&o, LLAMA ", \"bos_token_id\": null, \"eos_token_id\": 100}"); // the vocabulary ends at 99
    assert_int_equal(o.bos_token_id, -1);
    assert_int_equal(o.eos_token_id, -1);
    mt_options_free(&o);
}

/* All that describes the model, printed: two of these are equal when the models are. */
static char *describe(mt_run_options *o) {
    FILE *file = tmpfile();
    free(o->hf_config);
    o->hf_config = NULL;
    mt_options_print(o, MT_PROGRAM_TRAIN, file);
    fprintf(file, "%s %d %d %lld %lld %lld\n", mt_hf_family_name(o->stack.hf_family), o->stack.attention_output_bias,
            o->stack.mlp_bias, (long long)o->bos_token_id, (long long)o->eos_token_id,
            (long long)o->stack.padded_vocab_size);
    return read_stream(file);
}

#define MISTRAL        "{\"model_type\": \"mistral\", \"num_key_value_heads\": 2, " LLAMA_SIZES
#define QWEN3          "{\"model_type\": \"qwen3\", \"num_key_value_heads\": 2, " LLAMA_SIZES
#define FAMILY_EXPERTS ", \"num_experts_per_tok\": 8, \"num_local_experts\": 16, \"moe_intermediate_size\": 16"
#define MIXTRAL        "{\"model_type\": \"mixtral\", \"num_key_value_heads\": 2" FAMILY_EXPERTS ", " LLAMA_SIZES
#define QWEN2MOE                                                                                                       \
    "{\"model_type\": \"qwen2_moe\", \"num_key_value_heads\": 2, \"shared_expert_intermediate_size\": "                \
    "16" FAMILY_EXPERTS ", " LLAMA_SIZES
#define QWEN3MOE "{\"model_type\": \"qwen3_moe\", \"num_key_value_heads\": 2" FAMILY_EXPERTS ", " LLAMA_SIZES
#define DEEPSEEK_V3                                                                                                    \
    "{\"model_type\": \"deepseek_v3\", \"num_key_value_heads\": 4, \"kv_lora_rank\": 8, \"qk_nope_head_dim\": 4, "     \
    "\"qk_rope_head_dim\": 4, \"v_head_dim\": 4" FAMILY_EXPERTS ", \"num_hidden_layers\": 5, \"hidden_size\": 64, "    \
    "\"intermediate_size\": 128, \"num_attention_heads\": 4, \"max_position_embeddings\": 4096, \"vocab_size\": 100"
/* A family with Llama's sizes, and one with experts too. */
#define SIZES_OF(type) "{\"model_type\": \"" type "\", \"num_key_value_heads\": 2, " LLAMA_SIZES
#define EXPERTS_OF(type, count)                                                                                        \
    SIZES_OF(type) ", \"num_experts_per_tok\": 8, \"" count "\": 16, \"moe_intermediate_size\": 16"
#define DOTS1         EXPERTS_OF("dots1", "n_routed_experts") ", \"norm_topk_prob\": true, \"n_shared_experts\": 1"
#define GLM4_MOE      EXPERTS_OF("glm4_moe", "n_routed_experts")
#define MINIMAX_M2    SIZES_OF("minimax_m2") ", \"num_experts_per_tok\": 8, \"num_local_experts\": 16"
#define HY_V3         EXPERTS_OF("hy_v3", "num_experts")
#define SOLAR_OPEN    EXPERTS_OF("solar_open", "n_routed_experts")
#define EXAONE_MOE    EXPERTS_OF("exaone_moe", "num_experts")
#define MIMO_V2_FLASH EXPERTS_OF("mimo_v2_flash", "n_routed_experts")
#define ERNIE4_5_MOE  SIZES_OF("ernie4_5_moe") ", \"moe_num_experts\": 16, \"moe_intermediate_size\": 16"
#define GLM4_MOE_LITE                                                                                                  \
    "{\"model_type\": \"glm4_moe_lite\", \"num_key_value_heads\": 4, \"kv_lora_rank\": 8, \"qk_nope_head_dim\": 4, "   \
    "\"qk_rope_head_dim\": 4, \"v_head_dim\": 4, " LLAMA_SIZES FAMILY_EXPERTS
#define GPT2                                                                                                           \
    "{\"model_type\": \"gpt2\", \"n_layer\": 1, \"n_head\": 2, \"n_embd\": 8, \"n_positions\": 8, "                    \
    "\"vocab_size\": 60000"
#define LARGE_VOCABULARY                                                                                               \
    "\"num_hidden_layers\": 8, \"hidden_size\": 64, \"intermediate_size\": 128, \"num_attention_heads\": 4, "          \
    "\"max_position_embeddings\": 4096, \"vocab_size\": 130000"
#define SMOLLM3 "{\"model_type\": \"smollm3\", " LARGE_VOCABULARY
#define GEMMA3  "{\"model_type\": \"gemma3_text\", \"num_key_value_heads\": 2, " LARGE_VOCABULARY
#define OLMO3   "{\"model_type\": \"olmo3\", " LARGE_VOCABULARY
#define COMMON                                                                                                         \
    "\"initializer_range\": 0.02", "\"tie_word_embeddings\": false", "\"hidden_act\": \"silu\"",                       \
        "\"attention_dropout\": 0.0", "\"use_cache\": true", "\"rope_parameters\": null", "\"rope_scaling\": null"
#define GROUPS "\"n_group\": 1", "\"topk_group\": 1", "\"norm_topk_prob\": true", "\"n_shared_experts\": 1"
#define DELTA_KEYS                                                                                                     \
    "\"rms_norm_eps\": 1e-6", "\"rope_theta\": 10000.0", "\"head_dim\": 256", "\"partial_rotary_factor\": 0.25",       \
        "\"attention_bias\": false", "\"linear_conv_kernel_dim\": 4", "\"linear_key_head_dim\": 128",                  \
        "\"linear_value_head_dim\": 128", "\"linear_num_key_heads\": 16", "\"linear_num_value_heads\": 32",            \
        "\"layer_types\": null", "\"full_attention_interval\": 4",                                                     \
        "\"layer_types\": [\"linear_attention\", \"linear_attention\"]"
#define QWEN_WINDOW                                                                                                    \
    "\"use_sliding_window\": false", "\"sliding_window\": 4096", "\"max_window_layers\": 28", "\"layer_types\": null", \
        "\"bos_token_id\": null", "\"eos_token_id\": null"
#define QWEN_EXPERTS                                                                                                   \
    "\"decoder_sparse_step\": 1", "\"norm_topk_prob\": false", "\"router_aux_loss_coef\": 0.001",                      \
        "\"mlp_only_layers\": null", "\"mlp_only_layers\": []"

#define GPT_OSS "{\"model_type\": \"gpt_oss\""
#define GPT_OSS_ROPE                                                                                                   \
    "{\"rope_type\": \"yarn\", \"factor\": 32.0, \"beta_fast\": 32.0, \"beta_slow\": 1.0, \"truncate\": false, "       \
    "\"original_max_position_embeddings\": 4096"

#define NEMOTRON_H                                                                                                     \
    EXPERTS_OF("nemotron_h", "n_routed_experts")                                                                       \
    ", \"moe_shared_expert_intermediate_size\": 16, "                                                                  \
    "\"layers_block_type\": [\"linear_attention\", \"moe\", \"full_attention\", \"mlp\"]"
#define GRANITE SIZES_OF("granitemoehybrid") ", \"mamba_n_heads\": 4"
#define KIMI_LINEAR                                                                                                    \
    "{\"model_type\": \"kimi_linear\", \"num_key_value_heads\": 4, \"kv_lora_rank\": 8, \"qk_nope_head_dim\": 4, "     \
    "\"qk_rope_head_dim\": 4, \"v_head_dim\": 4, \"num_experts\": 16, \"moe_intermediate_size\": 16, " LLAMA_SIZES

#define GLM_MOE_DSA                                                                                                    \
    "{\"model_type\": \"glm_moe_dsa\", \"num_key_value_heads\": 4, \"kv_lora_rank\": 8, \"qk_nope_head_dim\": 4, "     \
    "\"qk_rope_head_dim\": 4, \"v_head_dim\": 4, \"q_lora_rank\": 12, \"hidden_size\": 64, "                           \
    "\"intermediate_size\": 128, \"num_attention_heads\": 4, \"max_position_embeddings\": 4096, \"vocab_size\": 100, " \
    "\"num_experts_per_tok\": 8, \"n_routed_experts\": 16, \"moe_intermediate_size\": 16"

/* The defaults of transformers 5 (configuration_FAMILY.py). */
static void a_key_that_a_family_omits_has_the_familys_default(void **state) {
    (void)state;
    static const struct {
        const char *file, *spelled[25]; // ends with NULL
    } families[] = {
        {GPT2,
         {"\"initializer_range\": 0.02", "\"tie_word_embeddings\": true", "\"n_inner\": null", "\"n_inner\": 32",
          "\"activation_function\": \"gelu_new\"", "\"layer_norm_epsilon\": 1e-5", "\"embd_pdrop\": 0.1",
          "\"resid_pdrop\": 0.1", "\"attn_pdrop\": 0.1", "\"scale_attn_weights\": true", "\"bos_token_id\": 50256",
          "\"eos_token_id\": 50256"}},
        {LLAMA,
         {COMMON, "\"num_key_value_heads\": 4", "\"num_key_value_heads\": null", "\"rms_norm_eps\": 1e-6",
          "\"rope_theta\": 10000.0", "\"head_dim\": 16", "\"head_dim\": null", "\"attention_bias\": false",
          "\"mlp_bias\": false", "\"bos_token_id\": 1", "\"eos_token_id\": 2"}},
        {MISTRAL,
         {COMMON, "\"rms_norm_eps\": 1e-6", "\"rope_theta\": 10000.0", "\"head_dim\": 16", "\"head_dim\": null",
          "\"sliding_window\": 4096", "\"bos_token_id\": 1", "\"eos_token_id\": 2"}},
        {MIXTRAL,
         {COMMON, "\"rms_norm_eps\": 1e-5", "\"rope_theta\": 1000000.0", "\"head_dim\": 16", "\"sliding_window\": null",
          "\"router_aux_loss_coef\": 0.001", "\"router_jitter_noise\": 0.0", "\"bos_token_id\": 1",
          "\"eos_token_id\": 2"}},
        {QWEN2, {COMMON, QWEN_WINDOW, "\"rms_norm_eps\": 1e-6", "\"rope_theta\": 10000.0", "\"head_dim\": 16"}},
        {QWEN3,
         {COMMON, QWEN_WINDOW, "\"rms_norm_eps\": 1e-6", "\"rope_theta\": 10000.0", "\"head_dim\": 128",
          "\"attention_bias\": false"}},
        {QWEN2MOE,
         {COMMON, QWEN_WINDOW, QWEN_EXPERTS, "\"rms_norm_eps\": 1e-6", "\"rope_theta\": 10000.0", "\"head_dim\": 16",
          "\"qkv_bias\": true"}},
        {QWEN3MOE,
         {COMMON, QWEN_WINDOW, QWEN_EXPERTS, "\"rms_norm_eps\": 1e-6", "\"rope_theta\": 10000.0", "\"head_dim\": 16",
          "\"attention_bias\": false"}},
        {DEEPSEEK_V3,
         {COMMON, "\"rms_norm_eps\": 1e-6", "\"rope_theta\": 10000.0", "\"q_lora_rank\": 1536",
          "\"rope_interleave\": true", "\"n_shared_experts\": 1", "\"n_group\": 8", "\"topk_group\": 4",
          "\"routed_scaling_factor\": 2.5", "\"first_k_dense_replace\": 3", "\"norm_topk_prob\": true",
          "\"attention_bias\": false", "\"num_nextn_predict_layers\": 1", "\"num_mtp_layers\": 1",
          "\"bos_token_id\": 0", "\"eos_token_id\": 1"}},
        {GPT_OSS,
         {COMMON, "\"num_hidden_layers\": 36", "\"num_local_experts\": 128", "\"vocab_size\": 201088",
          "\"hidden_size\": 2880", "\"intermediate_size\": 2880", "\"head_dim\": 64", "\"num_attention_heads\": 64",
          "\"num_key_value_heads\": 8", "\"sliding_window\": 128", "\"max_position_embeddings\": 131072",
          "\"rms_norm_eps\": 1e-5", "\"rope_theta\": 150000", "\"swiglu_limit\": 7.0", "\"swiglu_alpha\": 1.702",
          "\"attention_bias\": true"}},
        {GPT_OSS,
         {"\"num_experts_per_tok\": 4", "\"router_aux_loss_coef\": 0.001", "\"rope_parameters\": null",
          "\"rope_parameters\": " GPT_OSS_ROPE ", \"rope_theta\": 150000}", "\"rope_scaling\": " GPT_OSS_ROPE "}",
          "\"num_experts\": 128", "\"quantization_config\": {\"quant_method\": \"mxfp4\"}"}},
        {SMOLLM3,
         {"\"tie_word_embeddings\": true", "\"rms_norm_eps\": 1e-6", "\"rope_theta\": 2000000.0",
          "\"num_key_value_heads\": 4", "\"num_key_value_heads\": null", "\"head_dim\": null", "\"mlp_bias\": false",
          "\"attention_bias\": false", "\"use_sliding_window\": false", "\"sliding_window\": null",
          "\"no_rope_layers\": null", "\"no_rope_layers\": [1, 1, 1, 0, 1, 1, 1, 0]", "\"no_rope_layer_interval\": 4",
          "\"bos_token_id\": 128000", "\"eos_token_id\": 128001", "\"pad_token_id\": 128004",
          "\"hidden_act\": \"silu\""}},
        {GEMMA3,
         {"\"tie_word_embeddings\": true", "\"rms_norm_eps\": 1e-6", "\"rope_theta\": 1000000.0", "\"head_dim\": 256",
          "\"rope_local_base_freq\": 10000.0", "\"query_pre_attn_scalar\": 256", "\"sliding_window\": 4096",
          "\"sliding_window_pattern\": 6", "\"_sliding_window_pattern\": 6", "\"layer_types\": null",
          "\"hidden_activation\": \"gelu_pytorch_tanh\"", "\"attention_bias\": false",
          "\"rope_parameters\": {\"rope_theta\": 1000000.0, \"rope_type\": \"default\"}",
          "\"rope_parameters\": {\"sliding_attention\": {\"rope_theta\": 10000.0}}", "\"attn_logit_softcapping\": null",
          "\"use_bidirectional_attention\": null", "\"bos_token_id\": 2", "\"eos_token_id\": 1",
          "\"pad_token_id\": 0"}},
        {OLMO3,
         {COMMON, "\"rms_norm_eps\": 1e-5", "\"rope_theta\": 500000.0", "\"num_key_value_heads\": 4",
          "\"sliding_window\": 4096", "\"layer_types\": null", "\"attention_bias\": false",
          "\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 500000.0}}", "\"bos_token_id\": null",
          "\"eos_token_id\": 50279", "\"pad_token_id\": 1"}},
        {SIZES_OF("seed_oss"),
         {"\"attention_dropout\": 0.1", "\"residual_dropout\": 0.1", "\"attention_bias\": true", "\"mlp_bias\": false",
          "\"attention_out_bias\": false", "\"head_dim\": 128", "\"rms_norm_eps\": 1e-6", "\"rope_theta\": 10000.0",
          "\"bos_token_id\": 0", "\"eos_token_id\": 2"}},
        {DOTS1,
         {COMMON, "\"n_group\": 1", "\"topk_group\": 1", "\"routed_scaling_factor\": 1.0",
          "\"first_k_dense_replace\": 0", "\"sliding_window\": 4096", "\"max_window_layers\": 62",
          "\"attention_bias\": false", "\"head_dim\": 16", "\"rms_norm_eps\": 1e-6", "\"rope_theta\": 10000.0"}},
        {SIZES_OF("exaone4"),
         {COMMON, "\"sliding_window\": 4096", "\"sliding_window_pattern\": 4", "\"head_dim\": 16",
          "\"layer_types\": [\"sliding_attention\", \"sliding_attention\"]", "\"rms_norm_eps\": 1e-5",
          "\"rope_theta\": 10000.0", "\"bos_token_id\": 0", "\"eos_token_id\": 2"}},
        {GLM4_MOE,
         {COMMON, GROUPS, "\"partial_rotary_factor\": 0.5", "\"use_qk_norm\": false", "\"attention_bias\": false",
          "\"rms_norm_eps\": 1e-5", "\"rope_theta\": 10000.0", "\"routed_scaling_factor\": 1.0",
          "\"first_k_dense_replace\": 1", "\"num_nextn_predict_layers\": 1", "\"head_dim\": 16"}},
        {MINIMAX_M2,
         {COMMON, "\"rotary_dim\": 128", "\"head_dim\": 128", "\"rms_norm_eps\": 1e-6", "\"rope_theta\": 5000000.0",
          "\"router_aux_loss_coef\": 0.001", "\"router_jitter_noise\": 0.0", "\"use_qk_norm\": true",
          "\"qk_norm_type\": \"per_layer\"", "\"scoring_func\": \"sigmoid\"", "\"bos_token_id\": 200034"}},
        {HY_V3,
         {"\"initializer_range\": 0.006", "\"tie_word_embeddings\": false", "\"hidden_act\": \"silu\"",
          "\"attention_bias\": false", "\"mlp_bias\": false", "\"num_shared_experts\": 1", "\"head_dim\": 128",
          "\"router_scaling_factor\": 2.826", "\"enable_moe_fp32_combine\": true", "\"rms_norm_eps\": 1e-5",
          "\"mlp_layer_types\": [\"dense\", \"sparse\"]", "\"rope_theta\": 11158840.0"}},
        {SOLAR_OPEN,
         {COMMON, GROUPS, "\"partial_rotary_factor\": 1.0", "\"attention_bias\": false", "\"rms_norm_eps\": 1e-5",
          "\"rope_theta\": 1000000.0", "\"routed_scaling_factor\": 1.0", "\"head_dim\": 128"}},
        {EXAONE_MOE,
         {COMMON, "\"n_group\": 1", "\"topk_group\": 1", "\"num_shared_experts\": 1", "\"routed_scaling_factor\": 2.5",
          "\"first_k_dense_replace\": 1", "\"mlp_layer_types\": [\"dense\", \"sparse\"]", "\"sliding_window\": 4096",
          "\"sliding_window_pattern\": 4", "\"rms_norm_eps\": 1e-5", "\"bos_token_id\": 1", "\"eos_token_id\": 53"}},
        {SIZES_OF("ministral3"),
         {COMMON, "\"head_dim\": 128", "\"rms_norm_eps\": 1e-5", "\"sliding_window\": null",
          "\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 16, \"original_max_position_embeddings\": 16384, "
          "\"rope_theta\": 1e6, \"mscale\": 1, \"mscale_all_dim\": 1, \"llama_4_scaling_beta\": 0.1}"}},
        {ERNIE4_5_MOE,
         {"\"tie_word_embeddings\": true", "\"moe_k\": 6", "\"num_experts_per_tok\": 6",
          "\"moe_num_shared_experts\": 2", "\"moe_layer_start_index\": 1", "\"moe_layer_end_index\": -1",
          "\"moe_layer_end_index\": 1", "\"moe_layer_interval\": 1", "\"moe_norm_min\": 1e-12", "\"use_bias\": false",
          "\"rms_norm_eps\": 1e-5", "\"rope_theta\": 500000.0", "\"router_aux_loss_coef\": 0.001"}},
        {GLM4_MOE_LITE,
         {COMMON, GROUPS, "\"q_lora_rank\": 768", "\"rope_interleave\": true", "\"attention_bias\": false",
          "\"routed_scaling_factor\": 1.8", "\"mlp_layer_types\": [\"dense\", \"sparse\"]", "\"rms_norm_eps\": 1e-5",
          "\"rope_theta\": 10000.0", "\"bos_token_id\": 0", "\"eos_token_id\": 1"}},
        {EXPERTS_OF("qwen3_next", "num_experts") ", \"shared_expert_intermediate_size\": 16",
         {COMMON, DELTA_KEYS, "\"norm_topk_prob\": true"}},
        {EXPERTS_OF("qwen3_next", "num_experts") ", \"shared_expert_intermediate_size\": 16",
         {"\"decoder_sparse_step\": 1", "\"mlp_only_layers\": null", "\"mlp_only_layers\": []",
          "\"router_aux_loss_coef\": 0.001"}},
        {SIZES_OF("qwen3_5_text"), {COMMON, DELTA_KEYS}},
        {EXPERTS_OF("qwen3_5_moe_text", "num_experts") ", \"shared_expert_intermediate_size\": 16",
         {COMMON, DELTA_KEYS, "\"router_aux_loss_coef\": 0.001", "\"norm_topk_prob\": true"}},
        {MIMO_V2_FLASH,
         {"\"initializer_range\": 0.02",
          "\"tie_word_embeddings\": false",
          "\"hidden_act\": \"silu\"",
          "\"head_dim\": 192",
          "\"swa_head_dim\": 192",
          "\"v_head_dim\": 128",
          "\"swa_v_head_dim\": 128",
          "\"attention_value_scale\": 0.707",
          "\"sliding_window\": 129",
          "\"sliding_window_size\": 128",
          "\"swa_num_attention_heads\": 4",
          "\"swa_num_key_value_heads\": 4",
          "\"attention_bias\": false",
          "\"layer_types\": [\"full_attention\", \"sliding_attention\"]",
          "\"rms_norm_eps\": 1e-5",
          "\"mlp_layer_types\": [\"dense\", \"sparse\"]",
          "\"routed_scaling_factor\": 1.0",
          "\"routed_scaling_factor\": null",
          "\"n_group\": 1",
          "\"topk_group\": 1",
          "\"norm_topk_prob\": true",
          "\"rope_theta\": 5000000.0, \"swa_rope_theta\": 10000.0, \"partial_rotary_factor\": 0.334",
          "\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 5e6, \"partial_rotary_factor\": 0.334}, "
          "\"sliding_attention\": {\"rope_theta\": 1e4, \"partial_rotary_factor\": 0.334}}"}},
        {SIZES_OF("lfm2") ", \"full_attn_idxs\": [2]",
         {"\"initializer_range\": 0.02", "\"tie_word_embeddings\": true", "\"tie_embedding\": true",
          "\"attention_dropout\": 0.0", "\"norm_eps\": 1e-5", "\"rope_theta\": 1000000.0", "\"head_dim\": 16",
          "\"conv_L_cache\": 3", "\"conv_bias\": false", "\"block_auto_adjust_ff_dim\": true",
          "\"block_ffn_dim_multiplier\": 1.0", "\"block_multiple_of\": 256", "\"block_ff_dim\": 128",
          "\"layer_types\": [\"conv\", \"conv\"]", "\"rope_parameters\": null", "\"bos_token_id\": 1",
          "\"eos_token_id\": 2", "\"pad_token_id\": 0", "\"block_auto_adjust_ff_dim\": false, \"block_ff_dim\": 256"}},
        {NEMOTRON_H,
         {"\"initializer_range\": 0.02",
          "\"tie_word_embeddings\": false",
          "\"head_dim\": 128",
          "\"mamba_num_heads\": 128",
          "\"mamba_head_dim\": 64",
          "\"ssm_state_size\": 128",
          "\"n_groups\": 8",
          "\"conv_kernel\": 4",
          "\"use_conv_bias\": true",
          "\"use_bias\": false",
          "\"mlp_bias\": false",
          "\"mlp_hidden_act\": \"relu2\"",
          "\"layer_norm_epsilon\": 1e-5",
          "\"time_step_min\": 0.001",
          "\"moe_latent_size\": null",
          "\"n_group\": 1, \"topk_group\": 1",
          "\"routed_scaling_factor\": 1.0",
          "\"time_step_limit\": [0.0, Infinity]",
          "\"time_step_limit\": [0.0, {\"__float__\": \"Infinity\"}]",
          "\"hybrid_override_pattern\": \"ME*-\"",
          "\"bos_token_id\": 1",
          "\"eos_token_id\": 2",
          "\"pad_token_id\": 0"}},
        {GRANITE,
         {COMMON, "\"rms_norm_eps\": 1e-6", "\"mamba_n_groups\": 1", "\"mamba_d_conv\": 4", "\"mamba_d_state\": 256",
          "\"mamba_expand\": 2", "\"mamba_d_head\": \"auto\"", "\"mamba_d_head\": 32", "\"mamba_conv_bias\": true",
          "\"embedding_multiplier\": 1.0", "\"residual_multiplier\": 1.0", "\"attention_multiplier\": 1.0",
          "\"logits_scaling\": 1.0", "\"layer_types\": [\"mamba\", \"linear_attention\"]"}},
        {GRANITE,
         {"\"num_local_experts\": 8", "\"num_experts_per_tok\": 2", "\"shared_intermediate_size\": 1024",
          "\"router_aux_loss_coef\": 0.001", "\"time_step_limit\": [0.0, Infinity]", "\"time_step_limit\": null",
          "\"position_embedding_type\": \"nope\"", "\"position_embedding_type\": null", "\"rope_theta\": 10000.0",
          "\"mamba_proj_bias\": false", "\"bos_token_id\": 1", "\"eos_token_id\": 2"}},
        {KIMI_LINEAR,
         {"\"initializer_range\": 0.02",
          "\"tie_word_embeddings\": false",
          "\"hidden_act\": \"silu\"",
          "\"rms_norm_eps\": 1e-5",
          "\"attention_dropout\": 0.0",
          "\"attention_bias\": false",
          "\"model_max_length\": 4096",
          "\"q_lora_rank\": null",
          "\"mla_use_nope\": true",
          "\"num_experts_per_token\": 8",
          "\"num_experts_per_tok\": 8",
          "\"num_shared_experts\": 1",
          "\"num_expert_group\": 1, \"topk_group\": 1",
          "\"n_group\": 1",
          "\"routed_scaling_factor\": 2.446",
          "\"moe_renormalize\": true",
          "\"moe_router_activation_func\": \"sigmoid\"",
          "\"moe_layer_freq\": 1",
          "\"first_k_dense_replace\": 1",
          "\"mlp_layer_types\": [\"dense\", \"sparse\"]",
          "\"num_nextn_predict_layers\": 0",
          "\"linear_head_dim\": 128, \"linear_num_heads\": 32, \"linear_conv_kernel_dim\": 4",
          "\"layer_types\": [\"linear_attention\", \"linear_attention\"]",
          "\"linear_attn_config\": {\"head_dim\": 128, \"num_heads\": 32, \"short_conv_kernel_size\": 4, "
          "\"kda_layers\": [1, 2], \"full_attn_layers\": []}"}},
    };
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        mt_run_options sparse, full;
        char json[2000];
        snprintf(json, sizeof json, "%s}", families[i].file);
        expect_config(&sparse, json);
        int64_t stored = sparse.mtp_layers_stored;
        char *expected = describe(&sparse);
        for (const char *const *key = families[i].spelled; *key; key++) {
            snprintf(json, sizeof json, "%s, %s}", families[i].file, *key);
            expect_config(&full, json);
            char *found = describe(&full);
            if (strcmp(found, expected) != 0 || full.mtp_layers_stored != stored)
                fail_msg("%s\n  gives: %s\n  without %s: %s", json, found, *key, expected);
            free(found), mt_options_free(&full);
        }
        free(expected), mt_options_free(&sparse);
    }
}

/* Transformers 5.23: rope_parameters has an object for each type of layer, rope_scaling goes into that of full layers,
 * and what stands beside these objects is a default for few keys. */
static void rope_of_layers_with_a_window_is_read_as_in_transformers(void **state) {
    (void)state;
    static const struct {
        const char *keys;
        double gemma[2], olmo[2]; // bases of full layers and of layers with a window; 0: refused
        double factor;
    } cases[] = {
        {"\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 7}}", {7, 1e4}, {7, 5e5}, 1},
        {"\"rope_parameters\": {\"full_attention\": {\"rope_theta\": 7}, \"sliding_attention\": {\"rope_theta\": 5}}",
         {7, 5},
         {7, 5},
         1},
        {"\"rope_parameters\": {\"sliding_attention\": {\"rope_theta\": 5}}", {1e6, 5}, {5e5, 5}, 1},
        {"\"rope_parameters\": {}, \"rope_theta\": 7", {7, 1e4}, {0}, 1},
        {"\"rope_local_base_freq\": 6, \"rope_theta\": 7", {7, 6}, {0}, 1},
        {"\"rope_parameters\": {\"sliding_attention\": {\"rope_theta\": 5}}, \"rope_theta\": 7", {7, 5}, {7, 5}, 1},
        {"\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 4}", {1e6, 1e4}, {5e5, 5e5}, 4},
        {"\"rope_scaling\": {\"rope_type\": \"linear\", \"factor\": 4}, \"rope_parameters\": {\"full_attention\": "
         "{\"rope_theta\": 7, \"rope_type\": \"default\"}, \"sliding_attention\": {\"rope_theta\": 5}}",
         {7, 5},
         {7, 5},
         4},
        {"\"rope_parameters\": {\"full_attention\": {\"type\": \"linear\", \"factor\": 4}}", {1e6, 1e4}, {5e5, 5e5}, 4},
        {"\"rope_scaling\": {\"type\": \"linear\", \"factor\": 4}", {0}, {0}, 4},
        {"\"rope_parameters\": {\"rope_type\": \"linear\", \"factor\": 4}", {0}, {0}, 4},
        {"\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 7}", {0}, {0}, 1},
        {"\"rope_parameters\": {\"full_attention\": {\"rope_theta\": null}}", {0}, {0}, 1},
        {"\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"yarn\", \"factor\": 4}}, "
         "\"original_max_position_embeddings\": 1024",
         {0},
         {0},
         4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int k = 0; k < 2; k++) {
            const double *bases = k == 0 ? cases[i].gemma : cases[i].olmo;
            char json[1000];
            mt_run_options o;
            snprintf(json, sizeof json, "%s, %s}", k == 0 ? GEMMA3 : OLMO3, cases[i].keys);
            if (bases[0] == 0) {
                expect_config_error(json, "rope_");
                continue;
            }
            expect_config(&o, json);
            double window = o.stack.window_rotary_base > 0 ? o.stack.window_rotary_base : o.stack.rotary_base;
            bool scales =
                o.stack.rope_scaling_type == MT_ROPE_SCALING_LINEAR && o.stack.rope_scaling_factor == cases[i].factor;
            if (o.stack.rotary_base != bases[0] || window != bases[1] || (cases[i].factor != 1) != scales)
                fail_msg("%s\n  gives bases %g and %g, factor %g", json, o.stack.rotary_base, window,
                         o.stack.rope_scaling_factor);
            mt_options_free(&o);
        }
    expect_config_error(OLMO3 ", \"rope_parameters\": {\"sliding_attention\": {\"type\": \"linear\", \"factor\": 4}}}",
                        "\"linear\" in layers with a window is not supported");
    expect_config_error(GEMMA3 ", \"_sliding_window_pattern\": 4}", "give \"layer_types\"");
    expect_config_error(LLAMA ", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8, "
                              "\"high_freq_factor\": 4}}",
                        "\"low_freq_factor\" is missing");
    expect_config_error(LLAMA ", \"rope_parameters\": {\"rope_type\": null}}",
                        "\"rope_type\" of RoPE's parameters is null");
}

/* A flag that is null is false; a number or word that is null has no meaning where its absence has one. */
static void null_is_no_default(void **state) {
    (void)state;
    static const char *const numbers[][2] = {
        {LLAMA, "rms_norm_eps"},
        {LLAMA, "hidden_act"},
        {LLAMA, "initializer_range"},
        {GPT2, "layer_norm_epsilon"},
        {GPT2, "activation_function"},
        {GPT2, "embd_pdrop"},
        {GEMMA3, "head_dim"},
        {GEMMA3, "query_pre_attn_scalar"},
        {MIXTRAL, "router_aux_loss_coef"},
        {MIXTRAL, "router_jitter_noise"},
        {DEEPSEEK_V3, "routed_scaling_factor"},
    };
    char json[2000], expected[100];
    mt_run_options o;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        snprintf(json, sizeof json, "%s, \"%s\": null}", numbers[i][0], numbers[i][1]);
        snprintf(expected, sizeof expected, "\"%s\" is null; give a value, or leave the key out for ", numbers[i][1]);
        expect_config_error(json, expected);
    }
    expect_config(&o, DEEPSEEK_V3 ", \"rope_interleave\": null}");
    assert_false(o.stack.rotary_interleaved);
    mt_options_free(&o);
    expect_config(&o, QWEN2MOE ", \"qkv_bias\": null}");
    assert_false(o.stack.add_qkv_bias);
    mt_options_free(&o);
    expect_config(&o, GPT2 ", \"tie_word_embeddings\": null}");
    assert_true(o.stack.untie_embeddings_and_output_weights);
    mt_options_free(&o);
    expect_config_error(DEEPSEEK_V3 ", \"norm_topk_prob\": null}", "\"norm_topk_prob\": false is not supported");
    expect_config_error(LLAMA ", \"is_causal\": null}", "\"is_causal\": false is not supported");
}

/* A family's padding token is written where the vocabulary holds it; else no token, for transformers fails on one that
 * the embedding does not hold. */
static void a_familys_padding_token_is_written_only_if_the_vocabulary_holds_it(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {SMOLLM3, "\"pad_token_id\": 128004"},
        {"{\"model_type\": \"smollm3\", " LLAMA_SIZES, "\"pad_token_id\": null"},
        {GEMMA3, "\"pad_token_id\": 0"},
        {GEMMA3 ", \"pad_token_id\": null", "\"pad_token_id\": null"},
        {GEMMA3 ", \"pad_token_id\": 3", "\"pad_token_id\": 3"},
        {LLAMA, "\"pad_token_id\": null"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_run_options o;
        char json[1000];
        snprintf(json, sizeof json, "%s}", cases[i][0]);
        expect_config(&o, json);
        char *written = mt_options_write_hf_config(&o);
        if (!strstr(written, cases[i][1])) fail_msg("%s\n  is written as %s", json, written);
        free(written), mt_options_free(&o);
    }
}

/* A schedule of indexers is found from the list of as many layers as a model may have, or refused, without trying all
 * schedules: 10,000 x 10,000 of 10,000 layers would take hours. */
static void a_schedule_of_many_indexers_is_found_in_its_list(void **state) {
    (void)state;
    enum { LAYERS = 10000 };
    char pattern[LAYERS + 1] = {0}, *json = NULL;
    size_t size;
    for (int regular = 0; regular < 2; regular++) {
        mt_run_options o;
        mt_error error = {""};
        FILE *file = open_memstream(&json, &size);
        assert_non_null(file);
        for (int i = 0; i < LAYERS; i++) pattern[i] = i < 3 || (i - 2) % 4 == 0 ? 'F' : 'S';
        if (!regular) pattern[LAYERS - 3] = pattern[LAYERS - 3] == 'F' ? 'S' : 'F';
        fprintf(file, GLM_MOE_DSA ", \"num_hidden_layers\": %d, \"index_topk_pattern\": \"%s\"}", LAYERS, pattern);
        assert_int_equal(fclose(file), 0);
        mt_options_default(&o);
        int status = mt_options_read_hf_config(&o, json, (int64_t)size, "config.json", &error);
        if (regular && status != 0) fail_msg("%s", error.text);
        if (regular) assert_true(o.stack.dsa_indexer_topk_freq == 4 && o.stack.dsa_indexer_skip_topk_offset == 3);
        if (!regular && (status == 0 || !strstr(error.text, "only indexers in every so many layers")))
            fail_msg("%d: %s", status, error.text);
        mt_options_free(&o);
        free(json);
    }
}

/* Parts that a family arranges in its own way, from the keys of released files. */
static void families_keys_set_their_parts(void **state) {
    (void)state;
    mt_run_options o;
    expect_config(&o, GLM4_MOE ", \"rope_scaling\": null, \"rope_theta\": 1e6, \"partial_rotary_factor\": 0.25}");
    assert_true(o.stack.rotary_percent == 0.25 && o.stack.rotary_base == 1e6 && !o.stack.qk_layernorm &&
                !o.stack.add_qkv_bias);
    mt_options_free(&o);
    expect_config(&o, GLM4_MOE ", \"rope_parameters\": {\"rope_type\": \"default\", \"partial_rotary_factor\": 1.0}, "
                               "\"use_qk_norm\": true, \"attention_bias\": true}");
    assert_true(o.stack.rotary_percent == 1 && o.stack.qk_layernorm && o.stack.add_qkv_bias &&
                !o.stack.attention_output_bias);
    mt_options_free(&o);
    expect_config(&o, MINIMAX_M2 ", \"rotary_dim\": 64, \"head_dim\": 128}");
    assert_true(o.stack.rotary_percent == 0.5 && o.stack.qk_layernorm_all_heads && o.stack.moe_ffn_hidden_size == 128);
    mt_options_free(&o);
    expect_config(&o,
                  SIZES_OF("exaone4") ", \"sliding_window\": 8, \"sliding_window_pattern\": \"LG\", \"layer_types\": "
                                      "[\"sliding_attention\", \"full_attention\"]}");
    assert_true(mt_layer_kind_of(&o.stack, 0).window == 8 && mt_layer_kind_of(&o.stack, 0).rope == MT_ROPE_MODEL);
    assert_true(mt_layer_kind_of(&o.stack, 1).window == 0 && mt_layer_kind_of(&o.stack, 1).rope == MT_ROPE_NONE);
    mt_options_free(&o);
    expect_config(&o, SIZES_OF("exaone4") ", \"sliding_window\": null, \"sliding_window_pattern\": null}");
    for (int i = 0; i < 2; i++)
        assert_true(mt_layer_kind_of(&o.stack, i).rope == MT_ROPE_MODEL && o.stack.window_size == 0);
    mt_options_free(&o);
    expect_config(&o, ERNIE4_5_MOE ", \"moe_layer_start_index\": 0, \"moe_layer_interval\": 2}");
    assert_true(!mt_layer_has_experts(&o.stack, 0) && mt_layer_has_experts(&o.stack, 1) && o.stack.rotary_interleaved);
    mt_options_free(&o);
    expect_config(&o, HY_V3 ", \"mlp_layer_types\": [\"sparse\", \"dense\"]}");
    assert_true(mt_layer_has_experts(&o.stack, 0) && !mt_layer_has_experts(&o.stack, 1));
    mt_options_free(&o);
}

static void other_arrangements_of_a_family_are_refused(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {EXPERTS_OF("dots1", "n_routed_experts"), "\"norm_topk_prob\" is missing"},
        {EXPERTS_OF("dots1", "n_routed_experts") ", \"norm_topk_prob\": true", "\"n_shared_experts\" is missing"},
        {GLM4_MOE ", \"norm_topk_prob\": false", "\"norm_topk_prob\": false is not supported"},
        {GLM4_MOE ", \"hidden_act\": \"gelu\"", "\"hidden_act\": \"gelu\" is not supported"},
        {GLM4_MOE ", \"partial_rotary_factor\": 1.5", "\"partial_rotary_factor\" is 1.5"},
        {GLM4_MOE ", \"first_k_dense_replace\": 2", "no layer has experts"},
        {LLAMA ", \"partial_rotary_factor\": 0.5", "\"partial_rotary_factor\" other than 1 is not supported"},
        {GLM4_MOE_LITE ", \"partial_rotary_factor\": 0.5", "\"partial_rotary_factor\" other than 1"},
        {GLM4_MOE_LITE ", \"attention_bias\": true", "\"attention_bias\": true is not supported"},
        {MINIMAX_M2 ", \"rotary_dim\": 130, \"head_dim\": 128", "\"rotary_dim\" is 130, must be from 2"},
        {MINIMAX_M2 ", \"use_qk_norm\": false", "\"use_qk_norm\": false is not supported"},
        {MINIMAX_M2 ", \"qk_norm_type\": \"per_head\"", "\"qk_norm_type\": \"per_head\" is not supported"},
        {MINIMAX_M2 ", \"shared_intermediate_size\": 64", "\"shared_intermediate_size\": 64 is not supported"},
        {HY_V3 ", \"mlp_bias\": true", "\"mlp_bias\": true is not supported"},
        {HY_V3 ", \"mlp_layer_types\": [\"dense\"]", "\"mlp_layer_types\" must list 2 layers"},
        {HY_V3 ", \"mlp_layer_types\": [\"dense\", \"moe\"]", "\"mlp_layer_types\" holds moe"},
        {SIZES_OF("exaone4") ", \"layer_types\": [\"full_attention\", \"full_attention\"]", "without RoPE"},
        {SIZES_OF("exaone4") ", \"sliding_window_pattern\": \"LLLG\"", "\"sliding_window_pattern\" must be a whole"},
        {SIZES_OF("seed_oss") ", \"attention_bias\": false, \"attention_out_bias\": true", "\"attention_out_bias\""},
        {ERNIE4_5_MOE ", \"use_bias\": true", "\"use_bias\": true is not supported"},
        {ERNIE4_5_MOE ", \"moe_norm_min\": 0.1", "\"moe_norm_min\" above 1e-6"},
        {ERNIE4_5_MOE ", \"moe_layer_interval\": 0", "\"moe_layer_interval\" is 0"},
        {SIZES_OF("ministral3") ", \"rope_parameters\": {\"rope_theta\": 1e6, \"llama_4_scaling_beta\": 0.1}",
         "\"llama_4_scaling_beta\" needs RoPE of type yarn or llama3"},
        {SIZES_OF("ministral3") ", \"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 2}",
         "\"llama_4_scaling_beta\" is missing"},
        {LLAMA ", \"rope_parameters\": {\"rope_theta\": 1e6, \"llama_4_scaling_beta\": 0.1}", "ministral3 only"},
        {NEMOTRON_H ", \"moe_latent_size\": \"8\"", "\"moe_latent_size\" must be a whole number"},
        {NEMOTRON_H ", \"use_bias\": true", "\"use_bias\": true is not supported"},
        {NEMOTRON_H ", \"time_step_limit\": [0.0, 0.5]", "\"time_step_limit\" is [0, 0.5], which transformers 5 does"},
        {SIZES_OF("nemotron_h"), "\"layers_block_type\" is missing"},
        {SIZES_OF("nemotron_h") ", \"layers_block_type\": [\"sliding_attention\"]", "holds sliding_attention"},
        {GRANITE ", \"time_step_limit\": [0.5, 0.1]", "\"time_step_limit\" is [0.5, 0.1]; the least step"},
        {GRANITE ", \"time_step_limit\": [0.5]", "\"time_step_limit\" must be two numbers"},
        {GRANITE ", \"mamba_d_head\": 16", "\"mamba_n_heads\" 4 times \"mamba_d_head\" 16 is not"},
        {GRANITE ", \"attention_multiplier\": 0", "\"attention_multiplier\" is 0, must be above 0"},
        {GRANITE ", \"layer_types\": [\"mamba\", \"conv\"]", "\"layer_types\" holds conv"},
        {KIMI_LINEAR ", \"mla_use_nope\": false", "\"mla_use_nope\": false is not supported"},
        {KIMI_LINEAR ", \"moe_renormalize\": false", "\"moe_renormalize\": false is not supported"},
        {KIMI_LINEAR ", \"num_nextn_predict_layers\": 1", "\"num_nextn_predict_layers\" above 0 is not supported"},
        {KIMI_LINEAR ", \"layer_types\": [\"mamba\", \"full_attention\"]", "\"layer_types\" holds mamba"},
        {KIMI_LINEAR ", \"layer_types\": [\"full_attention\", \"full_attention\"]",
         "no layer has Kimi delta attention"},
        {KIMI_LINEAR ", \"linear_attn_config\": {\"kda_layers\": [1], \"full_attn_layers\": []}",
         "layer 2 is in neither \"kda_layers\" nor \"full_attn_layers\""},
        {KIMI_LINEAR ", \"linear_attn_config\": {\"kda_layers\": [1, \"a\"], \"full_attn_layers\": [2]}",
         "\"kda_layers\" must hold numbers of layers, from 1 to 2"},
        {KIMI_LINEAR ", \"linear_attn_config\": {\"kda_layers\": [1], \"full_attn_layers\": [9999]}",
         "\"full_attn_layers\" must hold numbers of layers, from 1 to 2"},
        {KIMI_LINEAR ", \"linear_attn_config\": {\"kda_layers\": [1, 2], \"full_attn_layers\": [2]}",
         "layer 2 stands twice in \"kda_layers\" and \"full_attn_layers\""},
        {GRANITE ", \"position_embedding_type\": \"banana\"", "\"position_embedding_type\" is banana; supported: rope"},
        {GLM_MOE_DSA ", \"num_hidden_layers\": 2, \"layer_types\": [\"indexed_attention\"]",
         "\"layer_types\" must list 2 layers"},
        {GLM_MOE_DSA ", \"num_hidden_layers\": 1099511627776",
         "\"num_hidden_layers\" is 1.09951e+12, must be in [1,10000]"},
        {KIMI_LINEAR ", \"linear_attn_config\": {\"num_heads\": 0}", "\"num_heads\" is 0, must be in [1,65536]"},
        {MIMO_V2_FLASH ", \"swa_head_dim\": 128", "\"head_dim\" and \"swa_head_dim\" differ"},
        {MIMO_V2_FLASH ", \"swa_v_head_dim\": 64", "\"v_head_dim\" and \"swa_v_head_dim\" differ"},
        {MIMO_V2_FLASH ", \"swa_num_attention_heads\": 8", "\"swa_num_attention_heads\" is 8"},
        {MIMO_V2_FLASH ", \"swa_num_key_value_heads\": 2", "have twice \"num_key_value_heads\" 2"},
        {MIMO_V2_FLASH ", \"sliding_window_size\": -1", "\"sliding_window_size\" is -1"},
        {MIMO_V2_FLASH ", \"attention_bias\": true", "\"attention_bias\": true is not supported"},
        {MIMO_V2_FLASH ", \"rope_parameters\": {\"sliding_attention\": {\"partial_rotary_factor\": 0.5}}",
         "\"partial_rotary_factor\" is 0.5 in layers with a window and 0.334 in others"},
        {SIZES_OF("lfm2") ", \"conv_bias\": true", "\"conv_bias\": true is not supported"},
        {SIZES_OF("lfm2"), "\"layer_types\" lists no layer of conv"},
        {SIZES_OF("lfm2") ", \"layer_types\": [\"conv\", \"mamba\"]", "full_attention and conv are supported"},
        {SIZES_OF("lfm2") ", \"full_attn_idxs\": [0], \"block_multiple_of\": 0", "\"block_multiple_of\" is 0"},
        {SIZES_OF("lfm2") ", \"full_attn_idxs\": [0], \"block_multiple_of\": 9223372036854775807",
         "must be in [1,16777216]"},
        {SIZES_OF("lfm2") ", \"full_attn_idxs\": [0], \"block_ffn_dim_multiplier\": -1", "must be in (0,1024]"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char json[2000];
        snprintf(json, sizeof json, "%s}", cases[i][0]);
        expect_config_error(json, cases[i][1]);
    }
}

/* Two keys of a file that stand for one thing: values that agree are no contradiction, others are refused. */
static void two_names_of_one_thing_must_agree(void **state) {
    (void)state;
    static const struct {
        const char *file, *agree, *differ, *message;
    } cases[] = {
        {NEMOTRON_H, "\"hybrid_override_pattern\": \"ME*-\"", "\"hybrid_override_pattern\": \"MEM-\"",
         "\"layers_block_type\" and \"hybrid_override_pattern\" give other layers, ME*- and MEM-"},
        {NEMOTRON_H, "\"layer_types\": [\"mamba\", \"moe\", \"attention\", \"mlp\"]",
         "\"layer_types\": [\"mamba\", \"moe\", \"mamba\", \"mlp\"]",
         "\"layers_block_type\" and \"layer_types\" give other layers"},
        {NEMOTRON_H ", \"n_groups\": 4", "\"mamba_n_groups\": 4", "\"mamba_n_groups\": 8",
         "\"n_groups\" is 4 and \"mamba_n_groups\" 8, two names of one thing"},
        {NEMOTRON_H, "\"num_local_experts\": 16", "\"num_local_experts\": 8",
         "\"num_local_experts\" is 8 and \"n_routed_experts\" 16"},
        {GRANITE ", \"layer_types\": [\"mamba\", \"attention\"]", "\"layers_block_type\": [\"mamba\", \"attention\"]",
         "\"layers_block_type\": [\"mamba\", \"mamba\"]", "two names of one thing"},
        {SIZES_OF("lfm2") ", \"layer_types\": [\"conv\", \"full_attention\"]", "\"full_attn_idxs\": [1]",
         "\"full_attn_idxs\": [0]", "differ in layer 0"},
        {SIZES_OF("lfm2") ", \"full_attn_idxs\": [1], \"tie_word_embeddings\": false", "\"tie_embedding\": false",
         "\"tie_embedding\": true", "\"tie_word_embeddings\" is false and \"tie_embedding\" true"},
        {KIMI_LINEAR ", \"num_experts_per_token\": 4", "\"num_experts_per_tok\": 4", "\"num_experts_per_tok\": 2",
         "two names of one thing"},
        {KIMI_LINEAR ", \"num_shared_experts\": 2", "\"n_shared_experts\": 2", "\"n_shared_experts\": 1",
         "two names of one thing"},
        {KIMI_LINEAR ", \"layer_types\": [\"linear_attention\", \"full_attention\"]",
         "\"linear_attn_config\": {\"kda_layers\": [1], \"full_attn_layers\": [2]}",
         "\"linear_attn_config\": {\"kda_layers\": [1, 2], \"full_attn_layers\": []}", "differ in layer 2"},
        {KIMI_LINEAR ", \"linear_num_heads\": 8", "\"linear_attn_config\": {\"num_heads\": 8}",
         "\"linear_attn_config\": {\"num_heads\": 4}", "\"num_heads\" of \"linear_attn_config\" is 4"},
        {MINIMAX_M2 ", \"head_dim\": 128, \"rope_parameters\": {\"rope_theta\": 1e4, \"partial_rotary_factor\": 0.5}",
         "\"rotary_dim\": 64", "\"rotary_dim\": 32", "\"rotary_dim\" is 32 and \"partial_rotary_factor\" 0.5"},
        {GLM4_MOE ", \"num_nextn_predict_layers\": 1", "\"num_mtp_layers\": 1", "\"num_mtp_layers\": 2",
         "two names of one thing"},
        {GLM4_MOE_LITE, "\"head_dim\": 4", "\"head_dim\": 8", "\"qk_rope_head_dim\" is 4 and \"head_dim\" 8"},
        {ERNIE4_5_MOE ", \"moe_k\": 4", "\"num_experts_per_tok\": 4", "\"num_experts_per_tok\": 2",
         "\"moe_k\" is 4 and \"num_experts_per_tok\" 2"},
        {QWEN3MOE, "\"n_routed_experts\": null", "\"n_routed_experts\": 3", "two names of one thing"},
        {GPT2, "\"num_hidden_layers\": 1", "\"num_hidden_layers\": 3", "\"n_layer\" is 1 and \"num_hidden_layers\" 3"},
        {LLAMA, "\"rope_scaling\": {\"rope_type\": \"linear\", \"type\": \"linear\", \"factor\": 2.0}",
         "\"rope_scaling\": {\"rope_type\": \"linear\", \"type\": \"yarn\", \"factor\": 2.0}",
         "\"rope_type\" is \"linear\" and \"type\" \"yarn\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mt_run_options once, twice;
        char json[2000];
        snprintf(json, sizeof json, "%s}", cases[i].file);
        expect_config(&once, json);
        snprintf(json, sizeof json, "%s, %s}", cases[i].file, cases[i].agree);
        expect_config(&twice, json);
        snprintf(json, sizeof json, "%s, %s}", cases[i].file, cases[i].differ);
        expect_config_error(json, cases[i].message);
        mt_options_free(&once), mt_options_free(&twice);
    }
    mt_run_options ignores; // a pattern beside a list, or in a family without one
    expect_config(&ignores, SIZES_OF("gemma3_text") ", \"sliding_window_pattern\": \"LG\", \"layer_types\": "
                                                    "[\"sliding_attention\", \"full_attention\"]}");
    mt_options_free(&ignores);
    expect_config(&ignores, QWEN2 ", \"sliding_window_pattern\": \"LG\", \"sliding_window\": 8, "
                                  "\"use_sliding_window\": true, \"max_window_layers\": 1}");
    mt_options_free(&ignores);
    expect_config_error(LLAMA ", \"architectures\": [\"LlamaForTokenClassification\"], \"id2label\": {\"0\": \"a\"}, "
                              "\"num_labels\": 2}",
                        "\"num_labels\" is 2 and \"id2label\" has 1");
}

/* Kimi K2 has a model_type of its own, and the class of DeepSeek-V3; what has neither is named with the families. */
static void a_class_that_is_known_stands_for_an_unknown_type(void **state) {
    (void)state;
    mt_run_options kimi, deepseek;
    char json[2000];
    snprintf(json, sizeof json, "%s, \"architectures\": [\"DeepseekV3ForCausalLM\"]}", DEEPSEEK_V3);
    expect_config(&deepseek, json);
    char *type = strstr(json, "deepseek_v3");
    memmove(type + strlen("kimi_k2"), type + strlen("deepseek_v3"), strlen(type + strlen("deepseek_v3")) + 1);
    memcpy(type, "kimi_k2", strlen("kimi_k2"));
    expect_config(&kimi, json);
    char *found = describe(&kimi), *expected = describe(&deepseek);
    assert_string_equal(found, expected);
    free(found), free(expected);
    mt_options_free(&kimi), mt_options_free(&deepseek);
    expect_config_error("{\"model_type\": \"kimi_k2\", \"architectures\": [\"KimiForCausalLM\"], " LLAMA_SIZES "}",
                        "\"model_type\" is kimi_k2, a kind of model that is not supported");
    expect_config_error("{\"model_type\": \"bert\", \"architectures\": [\"BertForMaskedLM\"], " LLAMA_SIZES "}",
                        "\"model_type\" is bert, a kind of model that is not supported; supported: gpt2 llama");
    expect_config_error("{\"model_type\": \"bert\", " LLAMA_SIZES "}", "(megatron: saved by this program");
    expect_config_error("{" LLAMA_SIZES "}", "\"model_type\" is missing; supported: gpt2 llama");
}

/* Each value is refused with its key; none counts as 0, false or absent. */
static void values_of_a_wrong_type_are_refused_with_their_key(void **state) {
    (void)state;
    static const struct {
        const char *file, *key, *wrong[5];
    } cases[] = {
        {QWEN2, "use_sliding_window", {"\"true\"", "1", "0", "[]", "{}"}},
        {QWEN2, "max_window_layers", {"\"0\"", "1.0", "true", "[0]", "1e40"}},
        {QWEN2, "layer_types", {"\"full_attention\"", "{}", "2", "true", "[1, 2]"}},
        {QWEN2, "sliding_window", {"\"17\"", "17.0", "true", "[17]", "{}"}},
        {LLAMA, "is_causal", {"false", "\"true\"", "1", "[]", "{}"}},
        {LLAMA, "rope_scaling", {"\"linear\"", "2", "true", "[1]", "1.5"}},
        {LLAMA, "rope_parameters", {"\"linear\"", "2", "true", "[1]", "1.5"}},
        {LLAMA, "partial_rotary_factor", {"\"1\"", "true", "[1]", "{}", "0.5"}},
        {LLAMA, "architectures", {"\"LlamaForTokenClassification\"", "1", "true", "{}", "[1]"}},
        {LLAMA, "quantization_config", {"\"fp8\"", "1", "true", "[]", "false"}},
        {LLAMA, "eos_token_id", {"\"2\"", "2.0", "true", "{}", "[[2]]"}},
        {LLAMA, "bos_token_id", {"\"2\"", "2.0", "true", "{}", "[2]"}},
        {LLAMA, "pad_token_id", {"\"2\"", "2.0", "true", "{}", "[2]"}},
        {LLAMA, "head_dim", {"\"16\"", "16.0", "true", "[16]", "1e40"}},
        {GPT2, "reorder_and_upcast_attn", {"\"false\"", "0", "true", "[]", "{}"}},
        {GPT2, "scale_attn_by_inverse_layer_idx", {"\"false\"", "0", "true", "[]", "{}"}},
        {GPT2, "n_inner", {"\"32\"", "32.0", "true", "[32]", "{}"}},
        {QWEN3MOE, "mlp_only_layers", {"\"0\"", "0", "true", "[\"0\"]", "[0.0]"}},
        {QWEN3MOE, "decoder_sparse_step", {"\"1\"", "1.0", "true", "[1]", "0"}},
        {QWEN3MOE, "norm_topk_prob", {"\"true\"", "1", "0", "[]", "{}"}},
        {MIXTRAL, "router_jitter_noise", {"\"0.0\"", "0.1", "true", "[0]", "{}"}},
        {DEEPSEEK_V3, "first_k_dense_replace", {"\"1\"", "1.0", "true", "[1]", "{}"}},
        {DEEPSEEK_V3, "num_nextn_predict_layers", {"\"1\"", "1.0", "true", "[1]", "-1"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int k = 0; k < 5; k++) {
            char json[2000], key[100];
            snprintf(json, sizeof json, "%s, \"%s\": %s}", cases[i].file, cases[i].key, cases[i].wrong[k]);
            snprintf(key, sizeof key, "%s\"", cases[i].key);
            bool of_rope = strncmp(cases[i].key, "rope_", 5) == 0;
            expect_config_error(json, of_rope ? "must be an object" : key);
        }
    expect_config_error(LLAMA ", \"rope_scaling\": {\"type\": \"linear\", \"factor\": \"2\"}}",
                        "\"factor\" must be a number");
    expect_config_error(GPT_OSS ", \"swiglu_alpha\": 1.5}", "\"swiglu_alpha\": 1.5 is not supported; 1.702 is");
    expect_config_error(GPT_OSS ", \"swiglu_limit\": 0}", "\"swiglu_limit\" is 0, must be in (0,1048576]");
    expect_config_error(GPT_OSS ", \"hidden_act\": \"gelu\"}", "\"hidden_act\": \"gelu\" is not supported; silu is");
    expect_config_error(GPT_OSS ", \"quantization_config\": {\"quant_method\": \"awq\"}}", "\"quant_method\" awq");
    expect_config_error(LLAMA ", \"quantization_config\": {\"quant_method\": \"mxfp4\"}}", "\"quant_method\" mxfp4");
    expect_config_error(LLAMA ", \"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 2, \"truncate\": 0}}",
                        "\"truncate\" must be true or false");
    expect_config_error(LLAMA ", \"architectures\": [\"LlamaForTokenClassification\"], \"num_labels\": \"1\"}",
                        "\"num_labels\" must be a whole number");
}

static void expect_round_trip(const char *line, const char *family) {
    mt_run_options options, again;
    char *folder = make_folder(), rest[400];
    expect_good(&options, line);
    assert_string_equal(mt_hf_family_name(options.stack.hf_family), family);
    char *json = mt_options_write_hf_config(&options), *path = write_file(folder, "config.json", json);
    snprintf(rest, sizeof rest, "--hf-config %s --mock-data --seq-length 16 --train-iters 10 --lr 1e-3", path);
    expect_good(&again, rest);
    char *first = describe(&options), *second = describe(&again);
    assert_string_equal(first, second);
    assert_true(mt_flops(&options.stack, 3) == mt_flops(&again.stack, 3));
    char *json_again = mt_options_write_hf_config(&again);
    assert_string_equal(json, json_again);
    free(first), free(second), free(json), free(json_again);
    remove_file(path), remove_folder(folder);
    mt_options_free(&options), mt_options_free(&again);
}

#define LENGTHS "--mock-data --seq-length 16 --train-iters 10 --lr 1e-3"
#define LATENT                                                                                                         \
    "--multi-latent-attention --qk-layernorm --latent-norm-epsilon 1e-6 --kv-lora-rank 16 --qk-head-dim 8 "            \
    "--qk-pos-emb-head-dim 4 --v-head-dim 6 "
#define GATED      "--num-experts 8 --moe-shared-expert-intermediate-size 24 --moe-shared-expert-gate "
#define SHARED     "--moe-ffn-hidden-size 8 --moe-shared-expert-intermediate-size 16 "
#define SIGMOIDS   "--num-experts 8 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
#define LIKE_LLAMA RUN "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear "
#define LIKE_GPT_OSS                                                                                                   \
    RUN "--normalization RMSNorm --position-embedding-type rope --rope-scaling-type yarn --rope-scaling-factor 4 "     \
        "--original-max-position-embeddings 4 --no-yarn-correction-range-round-to-int --num-experts 4 --quick-geglu "  \
        "--activation-func-clamp-value 7 --glu-linear-offset 1 --softmax-type learnable --moe-router-linear-bias "

static void written_configs_read_back_as_the_same_model(void **state) {
    (void)state;
    const char *names[] = {"gpt2-124m", "gpt2-1558m", "llama3-8b", "qwen3-0.6b", "tiny-llama", "llama2c-110m"};
    const char *families[] = {"gpt2", "gpt2", "llama", "qwen3", "llama", "llama"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char line[300];
        snprintf(line, sizeof line,
                 "--hf-config data/configs/%s.json --mock-data --seq-length 16 --train-iters 10 --lr 1e-3", names[i]);
        expect_round_trip(line, families[i]);
    }
    expect_round_trip("--hf-config tests/golden/hf/deepseek_v3_dense/config.json " LENGTHS, "deepseek_v3");
    expect_round_trip("--hf-config tests/golden/hf/deepseek_v3_no_q_latent/config.json " LENGTHS, "deepseek_v3");
    expect_round_trip("--hf-config tests/golden/hf/deepseek_v3/config.json --moe-aux-loss-coeff 0.01 " LENGTHS,
                      "deepseek_v3");
    expect_round_trip("--hf-config tests/golden/hf/deepseek_v32/config.json " LENGTHS, "deepseek_v32");
    expect_round_trip("--hf-config tests/golden/hf/glm_moe_dsa/config.json " LENGTHS, "glm_moe_dsa");
    expect_round_trip("--hf-config tests/golden/hf/glm_moe_dsa_shared/config.json " LENGTHS, "glm_moe_dsa");
    expect_round_trip("--hf-config tests/golden/hf/deepseek_v32/config.json --dsa-indexer-topk-freq 2 " LENGTHS,
                      "megatron");
    expect_round_trip(LIKE_LLAMA LATENT "--q-lora-rank 24", "deepseek_v3");
    expect_round_trip(LIKE_LLAMA "--swiglu=false --quick-geglu", "llama");
    expect_round_trip(LIKE_LLAMA "--num-experts 4 --moe-router-topk 2 --moe-router-linear-bias", "megatron");
    expect_round_trip(LIKE_LLAMA "--swiglu=false --quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1",
                      "megatron");
    expect_round_trip(LIKE_LLAMA "--activation-func-clamp-value 10", "megatron");
    expect_round_trip(LIKE_LLAMA LATENT "--rotary-interleaved", "deepseek_v3");
    expect_round_trip(LIKE_LLAMA LATENT "--window-size 4", "megatron");
    expect_round_trip(RUN, "gpt2");
    expect_round_trip(RUN "--norm-epsilon 1e-50", "gpt2");
    expect_round_trip(RUN "--openai-gelu --untie-embeddings-and-output-weights --norm-epsilon 1e-6", "gpt2");
    expect_round_trip(LIKE_LLAMA, "llama");
    expect_round_trip(LIKE_LLAMA "--hidden-dropout 0 --attention-dropout 0.3 --init-method-std 0.0123", "llama");
    expect_round_trip(LIKE_LLAMA "--use-rope-scaling=false --rope-scaling-type llama3 --rotary-base 5e5", "llama");
    expect_round_trip(LIKE_LLAMA "--rope-scaling-type linear --rope-scaling-factor 2.5 --kv-channels 32", "llama");
    expect_round_trip(LIKE_LLAMA "--rope-scaling-type yarn --rope-scaling-factor 4 --yarn-beta-slow 2 "
                                 "--original-max-position-embeddings 4",
                      "llama");
    expect_round_trip(LIKE_LLAMA
                      "--rope-scaling-type yarn --rope-scaling-factor 4 --original-max-position-embeddings 4 "
                      "--no-yarn-correction-range-round-to-int",
                      "llama");
    expect_round_trip(LIKE_LLAMA "--window-size 8", "mistral");
    expect_round_trip(LIKE_LLAMA "--window-size 8 --window-attn-skip-freq 2", "smollm3");
    expect_round_trip(LIKE_LLAMA "--qk-layernorm --window-size 8 --window-attn-skip-freq ([0]*1+[1]*1)", "qwen3");
    expect_round_trip(LIKE_LLAMA "--no-rope-freq 2", "smollm3");
    expect_round_trip(LIKE_LLAMA "--no-rope-freq ([1]*1+[0]*1) --softmax-scale 0.3", "megatron");
    expect_round_trip(LIKE_LLAMA "--norm-placement both", "megatron");
    expect_round_trip(LIKE_LLAMA "--embedding-multiplier 3", "megatron");
    expect_round_trip(LIKE_LLAMA "--layernorm-zero-centered-gamma", "megatron");
    expect_round_trip(LIKE_LLAMA "--norm-placement after --qk-layernorm --qk-layernorm-all-heads --window-size 8 "
                                 "--window-attn-skip-freq 2 --norm-epsilon 1e-5",
                      "olmo3");
    expect_round_trip(LIKE_LLAMA "--swiglu=false --geglu --norm-placement both --qk-layernorm --window-size 8 "
                                 "--window-attn-skip-freq 2 --window-rotary-base 10000 --rotary-base 1000000 "
                                 "--layernorm-zero-centered-gamma --embedding-multiplier 8",
                      "gemma3_text");
    expect_round_trip(LIKE_LLAMA "--add-qkv-bias --group-query-attention --num-query-groups 2", "qwen2");
    expect_round_trip(LIKE_LLAMA "--add-qkv-bias --window-size 5", "qwen2");
    expect_round_trip(LIKE_LLAMA "--qk-layernorm --kv-channels 32", "qwen3");
    expect_round_trip("--hf-config tests/golden/hf/qwen2_moe/config.json " LENGTHS, "qwen2_moe");
    expect_round_trip(LIKE_LLAMA "--add-qkv-bias " GATED, "qwen2_moe");
    expect_round_trip(LIKE_LLAMA "--moe-router-pre-softmax --moe-layer-freq ([1]*1+[0]*1) " GATED, "qwen2_moe");
    expect_round_trip(LIKE_LLAMA "--qk-layernorm " GATED, "megatron");
    expect_round_trip(RUN "--num-experts 4", "megatron"); // GELU and biases, which no family's experts have
    expect_round_trip(RUN "--num-experts 4 --openai-gelu --disable-bias-linear", "megatron");
    expect_round_trip(RUN "--swiglu --normalization RMSNorm --position-embedding-type rope --num-experts 4",
                      "megatron");
    expect_round_trip(LIKE_LLAMA "--num-experts 4", "mixtral");
    expect_round_trip(LIKE_GPT_OSS, "gpt_oss");
    expect_round_trip(LIKE_GPT_OSS "--activation-func-clamp-value 3.5 --window-size 8", "gpt_oss");
    expect_round_trip(LIKE_GPT_OSS "--window-size 8 --window-attn-skip-freq ([0]*1+[1]*1)", "gpt_oss");
    expect_round_trip(LIKE_GPT_OSS "--disable-bias-linear", "megatron"); // its experts have biases
    expect_round_trip(LIKE_GPT_OSS "--softmax-type off-by-one", "megatron");
    expect_round_trip(LIKE_GPT_OSS "--glu-linear-offset 0.5", "megatron");
    expect_round_trip(LIKE_GPT_OSS "--moe-router-pre-softmax", "megatron");
    expect_round_trip(LIKE_GPT_OSS "--moe-layer-freq ([1]*1+[0]*1)", "megatron");
    expect_round_trip("--hf-config tests/golden/hf/gpt_oss/config.json " LENGTHS, "gpt_oss");
    expect_round_trip(RUN "--swiglu --normalization RMSNorm --position-embedding-type rope", "llama");
    expect_round_trip(RUN "--swiglu --position-embedding-type rope --rotary-percent 0.5", "megatron");
    expect_round_trip(RUN "--position-embedding-type none --disable-bias-linear --window-size 3", "megatron");
    expect_round_trip(LIKE_LLAMA "--rotary-interleaved --add-qkv-bias", "megatron");
    expect_round_trip(LIKE_LLAMA
                      "--rope-scaling-type yarn --rope-scaling-factor 4 --original-max-position-embeddings 4 "
                      "--llama-4-scaling-beta 0.2",
                      "ministral3");
    expect_round_trip(LIKE_LLAMA "--qk-layernorm --norm-placement after", "exaone4");
    expect_round_trip(LIKE_LLAMA "--qk-layernorm --norm-placement after --no-rope-freq 2", "megatron");
    expect_round_trip(LIKE_LLAMA "--qk-layernorm --norm-placement after --window-size 8 --window-attn-skip-freq 2 "
                                 "--no-rope-freq 2",
                      "exaone4");
    expect_round_trip(LIKE_LLAMA SIGMOIDS SHARED "--rotary-percent 0.5 --moe-layer-freq ([0]*1+[1]*1)", "glm4_moe");
    expect_round_trip(LIKE_LLAMA SIGMOIDS SHARED "--rotary-percent 0.5 --moe-layer-freq ([1]*1+[0]*1)", "megatron");
    expect_round_trip(LIKE_LLAMA SIGMOIDS SHARED "--qk-layernorm", "dots1");
    expect_round_trip(LIKE_LLAMA SIGMOIDS SHARED "--qk-layernorm --moe-layer-freq ([1]*1+[0]*1)", "hy_v3");
    expect_round_trip(LIKE_LLAMA SIGMOIDS "--qk-layernorm --qk-layernorm-all-heads", "minimax_m2");
    expect_round_trip(LIKE_LLAMA "--num-experts 8 --moe-router-enable-expert-bias", "megatron");
    expect_round_trip(LIKE_LLAMA "--num-experts 8 --moe-router-enable-expert-bias --rotary-interleaved",
                      "ernie4_5_moe");
    expect_round_trip(LIKE_LLAMA "--qk-layernorm --add-qkv-bias", "megatron");
}

/* A new folder with the config.json of a run's model; remove_model takes it away again. */
static char *folder_of_model(const char *line) {
    mt_run_options options;
    char *folder = make_folder();
    expect_good(&options, line);
    char *json = mt_options_write_hf_config(&options);
    free(write_file(folder, "config.json", json));
    free(json);
    mt_options_free(&options);
    return folder;
}

static void remove_model(char *folder) {
    char path[200];
    snprintf(path, sizeof path, "%s/config.json", folder);
    assert_int_equal(unlink(path), 0);
    remove_folder(folder);
}

static void own_checkpoints_accept_the_options_that_made_them(void **state) {
    (void)state;
    static const char model[] = LIKE_LLAMA "--num-layers 3 --num-experts 8 --ffn-hidden-size 16 ";
    static const char *const same[][2] = {
        {"2", "([1]*1+[0]*1+[1]*1)"}, {"[0,1,1]", "([0]*1+[1]*2)"}, {"[0]*1+[1]*2", "[0,1,1]"}, {"1", "[1]*3"}};
    static const char *const families[] = {"", "--qk-layernorm "}; // mixtral or megatron, qwen3_moe
    char line[900], saved[600];
    mt_run_options options;
    for (size_t i = 0; i < 2 * sizeof same / sizeof *same; i++) {
        snprintf(saved, sizeof saved, "%s%s--moe-layer-freq %s", model, families[i % 2], same[i / 2][0]);
        char *folder = folder_of_model(saved);
        snprintf(line, sizeof line, "%.599s --load %s", saved, folder);
        expect_good(&options, line);
        mt_options_free(&options);
        snprintf(line, sizeof line, "%.599s --load %s --moe-layer-freq %s", saved, folder, same[i / 2][1]);
        expect_good(&options, line);
        mt_options_free(&options);
        snprintf(line, sizeof line, "%.599s --load %s --moe-layer-freq [1,1,0]", saved, folder);
        expect_error(line, "--moe-layer-freq is [1,1,0], but the weights have");
        remove_model(folder);
    }
    // Mixtral's config.json has one width, the experts'.
    snprintf(saved, sizeof saved, "%s--moe-ffn-hidden-size 4", model);
    char *folder = folder_of_model(saved);
    snprintf(line, sizeof line, "%.599s --load %s", saved, folder);
    expect_good(&options, line);
    assert_int_equal(options.stack.moe_ffn_hidden_size, 4);
    mt_options_free(&options);
    snprintf(line, sizeof line, "%.599s --load %s --moe-ffn-hidden-size 6", saved, folder);
    expect_error(line, "--moe-ffn-hidden-size is 6, but the weights have 4");
    snprintf(line, sizeof line, "%.599s --load %s", model, folder); // experts of 16
    expect_error(line, "--ffn-hidden-size is 16, but the weights have 4");
    remove_model(folder);
    static const char *const others[][2] = {
        {"--num-query-groups 0", "--num-query-groups 2"},
        {"--add-qkv-bias", "--add-qkv-bias --disable-bias-linear"},
        {"--kv-channels 16 --value-channels 16", "--kv-channels 16 --value-channels 8"},
        {"--position-embedding-type rope --no-rope-freq 9", "--position-embedding-type rope --no-rope-freq 2"}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        snprintf(saved, sizeof saved, RUN "%s", others[i][0]);
        folder = folder_of_model(saved);
        snprintf(line, sizeof line, "%.599s --load %s", saved, folder);
        expect_good(&options, line);
        mt_options_free(&options);
        snprintf(line, sizeof line, RUN "%s --load %s", others[i][1], folder);
        expect_error(line, "but the weights have");
        remove_model(folder);
    }
}

static void a_conversion_needs_no_sequence_length(void **state) {
    (void)state;
    mt_run_options o;
    mt_error error;
    const char *line = "--load tests/golden/hf/llama --save x --train-iters 0";
    expect_good(&o, line);
    assert_true(o.stack.seq_length > 0 && o.stack.seq_length <= o.stack.max_position_embeddings);
    mt_options_free(&o);
    if (parse(&o, MT_PROGRAM_TRAIN, 4,
              "--load tests/golden/hf/llama --save x --train-iters 0 --tensor-model-parallel-size 2 "
              "--sequence-parallel --context-parallel-size 2",
              &error))
        fail_msg("%s", error.text);
    mt_options_free(&o);
    char *folder = folder_of_model(RUN), run[300];
    char *trainer = write_file(folder, "trainer.json", "{\"seed\": 77, \"seq_length\": 12}");
    snprintf(run, sizeof run, "--load %s --save x --train-iters 0", folder);
    expect_good(&o, run);
    assert_int_equal(o.stack.seed, 77);
    assert_int_equal(o.stack.seq_length, 12);
    mt_options_free(&o);
    snprintf(run, sizeof run, "--load %s --save x --train-iters 0 --seed 5 --seq-length 8", folder);
    expect_good(&o, run);
    assert_true(o.stack.seed == 5 && o.stack.seq_length == 8);
    mt_options_free(&o);
    snprintf(run, sizeof run, "--load %s --train-iters 1 --mock-data --lr 1", folder);
    expect_error(run, "--seq-length is missing");
    remove_file(trainer), remove_model(folder);
}

static void bad_steps_have_rules_that_go_together(void **state) {
    (void)state;
    mt_run_options o;
    expect_good(&o, RUN);
    assert_true(o.stack.check_for_nan_in_loss_and_grad && o.exit_signal_handler && !o.stack.check_for_spiky_loss);
    assert_int_equal(o.stack.bad_step_policy, MT_BAD_STEP_STOP);
    mt_options_free(&o);
    expect_good(&o, RUN "--no-check-for-nan-in-loss-and-grad --no-exit-signal-handler");
    assert_true(!o.stack.check_for_nan_in_loss_and_grad && !o.exit_signal_handler);
    mt_options_free(&o);
    expect_good(&o, RUN "--no-check-for-nan-in-loss-and-grad --check-for-nan-in-loss-and-grad"); // the last one wins
    assert_true(o.stack.check_for_nan_in_loss_and_grad);
    mt_options_free(&o);
    expect_good(&o, RUN "--no-check-for-nan-in-loss-and-grad --check-for-spiky-loss --bad-step-policy skip");
    mt_options_free(&o);
    expect_error(RUN "--no-check-for-nan-in-loss-and-grad --bad-step-policy skip",
                 "--bad-step-policy has no effect with --no-check-for-nan-in-loss-and-grad");
    expect_good(&o, RUN "--rerun-mode validate_results --attention-backend auto --bf16");
    assert_true(o.stack.deterministic_mode); // the rerun must repeat bit for bit
    mt_options_free(&o);
    expect_error(RUN "--error-injection-rate 10", "--error-injection-rate needs --rerun-mode validate_results");
    expect_error(RUN "--error-injection-type persistent_error", "needs --error-injection-rate");
    expect_error(RUN "--rerun-mode validate_results --check-for-spiky-loss --no-check-for-nan-in-loss-and-grad "
                     "--error-injection-rate 10",
                 "--error-injection-rate has no effect with --no-check-for-nan-in-loss-and-grad");
    expect_error(RUN "--no-check-for-nan-in-loss-and-grad --rerun-mode validate_results",
                 "--rerun-mode has no effect with --no-check-for-nan-in-loss-and-grad");
    expect_error(RUN "--max-bad-steps-in-a-row 5",
                 "--max-bad-steps-in-a-row needs --bad-step-policy skip|rewind, not stop");
    expect_error(RUN "--bad-step-policy rewind", "--bad-step-policy rewind needs --save");
    expect_error(RUN "--bad-step-policy retry", "--bad-step-policy expects stop|skip|rewind, got 'retry'");
    expect_error(RUN "--loss-spike-factor 3", "--loss-spike-factor needs --check-for-spiky-loss");
    expect_error(RUN "--check-for-spiky-loss --loss-spike-factor 1", "--loss-spike-factor must be in (1,1e6], got 1");
    expect_error(RUN "--exit-signal SIGKILL", "--exit-signal expects SIGTERM|SIGINT|SIGUSR1|SIGUSR2");
    expect_error(RUN "--exit-signal SIGUSR1 --no-exit-signal-handler", "exclude each other");
}

/* Options within every other rule, checked against the limits of a backend. */
static void check_limits(const char *line, const mt_limits *limits, const char *expected) {
    mt_run_options options;
    mt_error error = {""};
    expect_good(&options, line);
    int result = mt_options_check_limits(&options.stack, limits, &error);
    if (!expected && result != 0) fail_msg("%s\n  gave: %s", line, error.text);
    if (expected && (result == 0 || strcmp(error.text, expected) != 0))
        fail_msg("%s\n  gave: %s\n  not: %s", line, error.text, expected);
    mt_options_free(&options);
}

static void a_preference_with_a_divergence_has_its_weight_and_tokens(void **state) {
    (void)state;
    expect_error(RUN "--stage dpo --kl-loss-type k1",
                 "--kl-loss-type has no effect without --kl-loss-coef; leave it out");
    expect_error(SHAPE "--train-iters 10 --lr 1e-3 --stage dpo --kl-loss-coef 1 --ref-logps-in-data --data-path x",
                 "--kl-loss-coef and --ref-logps-in-data exclude each other; leave one out");
}

#define ROUTED RUN "--swiglu --disable-bias-linear --num-experts "

static void what_exceeds_a_backends_limits_is_refused_in_one_line(void **state) {
    (void)state;
    const mt_limits none = {0}, limits = {.head_channels = 256,
                                          .router_topk = 32,
                                          .experts = 128,
                                          .aux_loss_experts = 96,
                                          .sinkhorn_experts = 64};
    const mt_limits turing = {.no_bf16 = true};
    check_limits(RUN "--bf16", &none, NULL);
    check_limits(RUN "--fp16", &turing, NULL);
    check_limits(RUN "--bf16", &turing, "--bf16 needs a GPU of compute capability 8.0 or more; take --fp16");
    expect_error(RUN "--fp16 --fp8-format e4m3", "--fp8-format and --fp16 exclude each other; leave one out");
    check_limits(RUN "--optimizer muon", &turing,
                 "--muon-fp32-matmul-prec medium needs a GPU of compute capability 8.0 or more; take high");
    const mt_limits biases = {.bias_buckets = 64};
#define T5                                                                                                             \
    "--num-layers 2 --decoder-num-layers 2 --hidden-size 64 --num-attention-heads 4 --vocab-size 300 --sft --lr 1e-3 " \
    "--encoder-seq-length 16 --decoder-seq-length 16 --data-path x --train-iters 10 --position-embedding-type "        \
    "relative --normalization RMSNorm --disable-bias-linear --relu --softmax-scale 1 --hidden-dropout 0 "              \
    "--attention-dropout 0 "
    check_limits(T5 "--relative-attention-num-buckets 66", &none, NULL);
    check_limits(T5 "--relative-attention-num-buckets 64", &biases, NULL);
    check_limits(T5 "--relative-attention-num-buckets 66", &biases,
                 "--relative-attention-num-buckets is 66, and attention on this device has biases for at most 64 "
                 "buckets");
#undef T5
    const mt_limits heads = {.head_channels = 16};
#define TOWER                                                                                                          \
    RUN "--normalization RMSNorm --swiglu --disable-bias-linear --add-qkv-bias --position-embedding-type rope "        \
        "--mrope-section 4 2 2 --image-token-id 7 --vision-tower qwen2_5 "                                             \
        "--vision-window-size 112 --vision-num-layers 1 --vision-ffn-hidden-size 64 --vision-num-attention-heads 2 "
    check_limits(TOWER "--vision-hidden-size 32", &heads, NULL);
    check_limits(TOWER "--vision-hidden-size 40", &heads,
                 "--vision-hidden-size / --vision-num-attention-heads is 20, and attention on this device takes heads "
                 "of at most 16 channels");
#undef TOWER
    check_limits(RUN "--kv-channels 512", &none, NULL);
    check_limits(RUN "--kv-channels 256", &limits, NULL);
    check_limits(RUN "--kv-channels 258", &limits,
                 "--kv-channels is 258, and attention on this device takes heads of at most 256 channels");
    check_limits(RUN "--value-channels 256", &limits, NULL);
    check_limits(RUN "--value-channels 258", &limits,
                 "--value-channels is 258, and attention on this device takes heads of at most 256 channels");
    check_limits(ROUTED "64 --moe-router-topk 33", &none, NULL);
    check_limits(ROUTED "64 --moe-router-topk 32", &limits, NULL);
    check_limits(ROUTED "64 --moe-router-topk 33", &limits,
                 "--moe-router-topk is 33, and routers on this device choose at most 32 experts per token");
    check_limits(ROUTED "128", &limits, NULL);
    check_limits(ROUTED "129", &limits,
                 "--num-experts is 129, and routers on this device have at most 128 experts with "
                 "--moe-router-num-groups 0");
    check_limits(ROUTED "128 --moe-router-num-groups 8 --moe-router-group-topk 2", &limits,
                 "--num-experts is 128, and routers on this device have at most 96 experts with "
                 "--moe-router-num-groups 8");
    check_limits(ROUTED "97 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01", &limits,
                 "--num-experts is 97, and --moe-aux-loss-coeff and --moe-z-loss-coeff on this device take at most 96 "
                 "experts");
    check_limits(ROUTED "65 --moe-router-load-balancing-type sinkhorn --moe-router-topk 1 "
                        "--moe-router-score-function sigmoid",
                 &limits,
                 "--num-experts is 65, and --moe-router-load-balancing-type sinkhorn on this device takes at most 64 "
                 "experts");
    const mt_limits delta = {.delta_channels = 128};
#define DELTA RUN "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    check_limits(DELTA "--linear-key-head-dim 128 --linear-value-head-dim 128", &delta, NULL);
    check_limits(DELTA "--linear-key-head-dim 136", &delta,
                 "--linear-key-head-dim is 136, and the gated delta rule on this device takes heads of at most 128 "
                 "channels");
    check_limits(DELTA "--linear-value-head-dim 256", &delta,
                 "--linear-value-head-dim is 256, and the gated delta rule on this device takes heads of at most 128 "
                 "channels");
    check_limits(RUN "--experimental-attention-variant kda --linear-attention-freq 2 --linear-num-key-heads 4 "
                     "--linear-num-value-heads 4 --linear-key-head-dim 136 --linear-value-head-dim 136",
                 &delta,
                 "--linear-key-head-dim is 136, and the gated delta rule on this device takes heads of at most 128 "
                 "channels");
    const mt_limits ssd = {.ssd_rows = 256, .ssd_columns = 128};
#define SSD                                                                                                            \
    RUN "--experimental-attention-variant mamba2 --linear-attention-freq 2 --mamba-num-groups 2 --mamba-num-heads 4 "
    check_limits(SSD "--mamba-state-dim 256 --mamba-head-dim 128", &ssd, NULL);
    check_limits(SSD "--mamba-state-dim 264", &ssd,
                 "--mamba-state-dim is 264, and Mamba-2 on this device takes states of at most 256");
    check_limits(SSD "--mamba-head-dim 136", &ssd,
                 "--mamba-head-dim is 136, and Mamba-2 on this device takes heads of at most 128 channels");
    check_limits(RUN "--attention-backend unfused", &none, NULL);
    check_limits(RUN "--attention-backend unfused", &mt_cpu_ops.limits,
                 "--attention-backend unfused needs a GPU, and this run is on the CPU; leave it out");
}

static void sizes_that_cudnn_cannot_take_are_refused(void **state) {
    (void)state;
    const mt_limits cudnn = {.cudnn_tokens = 128,
                             .cudnn_head_channels = 128,
                             .cudnn_channels = 128,
                             .cudnn_latent_channels = 192},
                    without = {0};
    check_limits(FOR_CUDNN, &cudnn, NULL);
    check_limits(FOR_CUDNN "--kv-channels 20", &cudnn,
                 "--attention-backend cudnn needs heads of a multiple of 8 channels, at most 128, and --kv-channels is "
                 "20; use flash");
    check_limits(FOR_CUDNN "--kv-channels 136", &cudnn,
                 "--attention-backend cudnn needs heads of a multiple of 8 channels, at most 128, and --kv-channels is "
                 "136; use flash");
    check_limits(
        FOR_CUDNN "--kv-channels 64 --value-channels 32", &cudnn,
        "--attention-backend cudnn needs values as wide as keys, and --value-channels is 32, --kv-channels 64; "
        "use flash");
    check_limits(FOR_CUDNN "--seq-length 200", &cudnn,
                 "--attention-backend cudnn needs a --seq-length that is a multiple of 128, not 200; use flash");
#define LATENT_FOR_CUDNN LATENT_RUN "--bf16 --attention-dropout 0 --attention-backend cudnn --qk-head-dim "
    check_limits(LATENT_FOR_CUDNN "64 --qk-pos-emb-head-dim 32 --v-head-dim 64 --seq-length 256", &cudnn,
                 "--attention-backend cudnn needs values as wide as keys, or keys of 192 and values of 128, and "
                 "--v-head-dim is 64, --qk-head-dim + --qk-pos-emb-head-dim 96; leave it out");
    check_limits(LATENT_FOR_CUDNN "128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --seq-length 256", &cudnn, NULL);
    check_limits(FOR_CUDNN, &without,
                 "--attention-backend cudnn: built without cuDNN; install it and make, or use flash");
    check_limits(FOR_CUDNN, &mt_cpu_ops.limits,
                 "--attention-backend cudnn needs a GPU, and this run is on the CPU; leave it out");
}

static void a_model_asks_its_backend_for_limits(void **state) {
    (void)state;
    mt_run_options options;
    mt_model *model;
    mt_model_plan plan = {.max_tokens = 16, .max_logits = 16, .train = true};
    mt_error error;
    mt_ops ops = mt_cpu_ops;
    ops.limits.router_topk = 32;
    expect_good(&options, ROUTED "64 --moe-router-topk 33");
    assert_int_equal(mt_model_create(&model, &options.stack, &mt_grid_of_one, &ops, &plan, &error), -1);
    assert_non_null(strstr(error.text, "--moe-router-topk is 33"));
    mt_options_free(&options);
}

/* mt_options_plain is what data/ makes of the same sizes, in every option that megatron.c reads. */
static void plain_options_are_the_finished_defaults(void **state) {
    (void)state;
    static const char *const settings[][2] = {
        {"num_layers", "2"},  {"hidden_size", "32"}, {"num_attention_heads", "4"},      {"vocab_size", "64"},
        {"seq_length", "16"}, {"lr", "1"},           {"max_position_embeddings", "16"}, {"train_iters", "3"}};
    mt_run_options plain = {.stack = mt_options_plain(2, 32, 4, 64, 16)}, finished;
    mt_error error;
    mt_options_default(&finished);
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        assert_int_equal(mt_options_set(&finished, settings[i][0], settings[i][1], &error), 0);
    if (mt_options_finish(&finished, MT_PROGRAM_LIBRARY, 1, &error) != 0) fail_msg("%s", error.text);
    plain.stack.lr = 1, plain.stack.train_iters = plain.stack.num_iterations = 3;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        bool skipped = !row->name || mt_option_of(row->offset) != row || row->offset >= sizeof plain.stack;
        if (skipped || (row->type != MT_INT && row->type != MT_REAL && row->type != MT_FLAG && row->type != MT_CHOICE))
            continue;
        char *a = mt_option_text(&plain, row), *b = mt_option_text(&finished, row);
        if (strcmp(a, b) != 0) fail_msg("%s: %s, not %s", row->name, a, b);
        free(a);
        free(b);
    }
    assert_true(plain.stack.moe_grouped_gemm == finished.stack.moe_grouped_gemm);
    assert_true(plain.stack.moe_permute_fusion == finished.stack.moe_permute_fusion &&
                plain.stack.fp8_wgrad == finished.stack.fp8_wgrad);
    assert_true(plain.stack.attention_output_bias == finished.stack.attention_output_bias &&
                plain.stack.mlp_bias == finished.stack.mlp_bias);
    assert_true(plain.stack.padded_vocab_size == finished.stack.padded_vocab_size &&
                plain.stack.num_iterations == finished.stack.num_iterations);
    assert_true(plain.stack.data_parallel_size == finished.stack.data_parallel_size);
    assert_true(plain.stack.context_a2a_size == finished.stack.context_a2a_size);
    mt_options_free(&finished);
}

/* A size that is forgotten in options filled by hand is named; so is the first of options that are all 0. */
static void a_forgotten_size_is_named(void **state) {
    (void)state;
    static const struct {
        const char *name;
        size_t field;
        bool is_real;
    } sizes[] = {{"num_layers", offsetof(mt_options, num_layers), false},
                 {"hidden_size", offsetof(mt_options, hidden_size), false},
                 {"num_attention_heads", offsetof(mt_options, num_attention_heads), false},
                 {"kv_channels", offsetof(mt_options, kv_channels), false},
                 {"ffn_hidden_size", offsetof(mt_options, ffn_hidden_size), false},
                 {"vocab_size", offsetof(mt_options, vocab_size), false},
                 {"padded_vocab_size", offsetof(mt_options, padded_vocab_size), false},
                 {"tensor_model_parallel_size", offsetof(mt_options, tensor_model_parallel_size), false},
                 {"pipeline_model_parallel_size", offsetof(mt_options, pipeline_model_parallel_size), false},
                 {"context_parallel_size", offsetof(mt_options, context_parallel_size), false},
                 {"expert_model_parallel_size", offsetof(mt_options, expert_model_parallel_size), false},
                 {"data_parallel_size", offsetof(mt_options, data_parallel_size), false},
                 {"global_batch_size", offsetof(mt_options, global_batch_size), false},
                 {"norm_epsilon", offsetof(mt_options, norm_epsilon), true},
                 {"logits_scaling", offsetof(mt_options, logits_scaling), true}};
    mt_model_plan plan = {.max_tokens = 16, .max_logits = 16, .max_position = 16, .train = true};
    mt_model *model = NULL;
    mt_error error;
    char expected[160];
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        mt_options options = mt_options_plain(2, 32, 4, 64, 16);
        if (sizes[i].is_real)
            *(double *)(void *)((char *)&options + sizes[i].field) = 0;
        else
            *(int64_t *)(void *)((char *)&options + sizes[i].field) = 0;
        assert_int_equal(mt_model_create(&model, &options, &mt_grid_of_one, &mt_cpu_ops, &plan, &error), -1);
        snprintf(expected, sizeof expected, "mt_options.%s is 0, and must be above 0: ", sizes[i].name);
        if (strncmp(error.text, expected, strlen(expected)) != 0) fail_msg("%s: %s", sizes[i].name, error.text);
    }
    mt_options none = {0}, plain = mt_options_plain(2, 32, 0, 64, 16);
    assert_int_equal(mt_model_create(&model, &none, &mt_grid_of_one, &mt_cpu_ops, &plan, &error), -1);
    assert_non_null(strstr(error.text, "mt_options.num_layers is 0"));
    assert_int_equal(mt_model_create(&model, &plain, &mt_grid_of_one, &mt_cpu_ops, &plan, &error), -1);
    assert_non_null(strstr(error.text, "mt_options.num_attention_heads is 0"));
    plain = mt_options_plain(2, 32, 4, 64, 16);
    assert_int_equal(mt_model_create(&model, &plain, &mt_grid_of_one, &mt_cpu_ops, &plan, &error), 0);
    mt_model_destroy(model);
}

static void ask_to_stop(void) {
    raise(SIGTERM);
}

/* A launcher ends the ranks of a job when the first of them has ended: then a run that was refused says nothing of a
 * step. */
static void a_signal_after_a_refusal_adds_no_line(void **state) {
    (void)state;
    int ends[2], status;
    char text[400] = "";
    assert_int_equal(pipe(ends), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        static mt_run_options options;
        mt_grid grid = mt_grid_of_one;
        mt_error error;
        mt_error_set(&error, "no such thing");
        dup2(ends[1], STDERR_FILENO);
        mt_signals_hold();
        mt_signals_note("stopping\n", "stopping\n");
        atexit(ask_to_stop);
        mt_report_refusal(&grid, &options, -1, &error);
        _exit(9);
    }
    close(ends[1]);
    for (ssize_t n, all = 0; (n = read(ends[0], text + all, sizeof text - 1 - (size_t)all)) > 0;) all += n;
    close(ends[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    assert_string_equal(text, "error: no such thing\n");
}

static const struct CMUnitTest tests[] = {
    cmocka_unit_test(a_forgotten_size_is_named),
    cmocka_unit_test(defaults_are_those_of_megatron),
    cmocka_unit_test(command_line_sets_every_type),
    cmocka_unit_test(shape_is_derived_as_megatron_does),
    cmocka_unit_test(finish_twice_changes_nothing),
    cmocka_unit_test(vocabulary_may_come_from_the_tokenizer_after_parsing),
    cmocka_unit_test(the_table_of_options_is_sound),
    cmocka_unit_test(options_are_set_by_name),
    cmocka_unit_test(set_by_name_and_the_command_line_give_one_answer),
    cmocka_unit_test(names_that_would_change_numbers_are_no_notes),
    cmocka_unit_test(a_program_sets_no_file_and_no_name_without_effect),
    cmocka_unit_test(a_program_with_its_own_data_needs_no_option_of_data),
    cmocka_unit_test(malformed_command_lines_are_refused_in_one_line),
    cmocka_unit_test(values_out_of_range_are_refused),
    cmocka_unit_test(shapes_that_cannot_be_are_refused),
    cmocka_unit_test(rules_between_values_hold_for_a_struct),
    cmocka_unit_test(a_hybrid_pattern_names_the_one_half_of_every_layer),
    cmocka_unit_test(latent_attention_that_cannot_be_is_refused),
    cmocka_unit_test(the_timeout_of_the_start_is_also_that_of_steps_and_the_least_of_saves),
    cmocka_unit_test(ranks_are_shared_out_and_what_is_left_is_data_parallel),
    cmocka_unit_test(layouts_that_cannot_be_are_refused),
    cmocka_unit_test(batches_and_lengths_that_cannot_be_are_refused),
    cmocka_unit_test(context_parallelism_that_cannot_be_is_refused),
    cmocka_unit_test(schedules_that_cannot_be_are_refused),
    cmocka_unit_test(data_and_checkpoints_that_conflict_are_refused),
    cmocka_unit_test(messages_have_the_names_that_were_given),
    cmocka_unit_test(values_that_agree_are_no_contradiction),
    cmocka_unit_test(options_at_their_default_without_effect_are_named),
    cmocka_unit_test(options_for_a_gpu_are_named_on_the_cpu),
    cmocka_unit_test(warnings_have_the_names_that_were_given),
    cmocka_unit_test(slow_attention_is_announced),
    cmocka_unit_test(strategies_of_data_parallelism_are_checked),
    cmocka_unit_test(a_split_backward_needs_whole_gradients),
    cmocka_unit_test(attention_backends_that_cannot_serve_are_refused),
    cmocka_unit_test(infer_is_checked_too),
    cmocka_unit_test(every_name_of_megatron_has_one_answer),
    cmocka_unit_test(options_that_megatron_lacks_are_marked),
    cmocka_unit_test(answers_name_the_option_to_use),
    cmocka_unit_test(all_refused_names_are_reported_at_once),
    cmocka_unit_test(other_names_of_an_option_set_it),
    cmocka_unit_test(names_that_state_what_is_so_take_no_other_value),
    cmocka_unit_test(a_blend_may_be_one_text),
    cmocka_unit_test(help_shows_the_programs_own_options_within_100_columns),
    cmocka_unit_test(help_searches_names_and_texts),
    cmocka_unit_test(configuration_prints_what_differs_from_defaults),
#ifdef MT_HAVE_YAML
    cmocka_unit_test(yaml_sets_options_and_the_command_line_wins),
    cmocka_unit_test(yaml_has_the_booleans_of_yaml_1_1),
    cmocka_unit_test(yaml_has_the_numbers_of_yaml_1_1),
    cmocka_unit_test(yaml_lists_the_layers_of_every_option_that_names_them),
    cmocka_unit_test(bad_yaml_is_refused_with_file_and_line),
    cmocka_unit_test(files_of_other_programs_have_one_line),
    cmocka_unit_test(vocabularies_of_words_are_refused),
    cmocka_unit_test(arguments_of_a_file_may_be_given_again),
    cmocka_unit_test(deep_yaml_is_refused_before_it_is_parsed),
    cmocka_unit_test(many_anchors_are_refused_before_they_are_parsed),
    cmocka_unit_test(many_unknown_names_are_counted),
    cmocka_unit_test(yaml_values_may_be_aliases_merges_and_references),
    cmocka_unit_test(yaml_merges_do_not_explode),
    cmocka_unit_test(every_value_has_its_origin),
    cmocka_unit_test(contradictions_have_both_origins),
    cmocka_unit_test(a_file_of_megatrons_tests_is_read),
    cmocka_unit_test(huge_yaml_is_refused),
    cmocka_unit_test(an_empty_yaml_sets_nothing),
#else
    cmocka_unit_test(yaml_is_refused_without_the_library),
#endif
    cmocka_unit_test(published_shapes_have_their_published_numbers_of_parameters),
    cmocka_unit_test(operation_count_of_llama3_8b_equals_megatron),
    cmocka_unit_test(operation_count_of_qwen3_30b_equals_megatron),
    cmocka_unit_test(a_window_counts_its_keys_only),
    cmocka_unit_test(a_tower_counts_products_and_pairs_of_patches),
    cmocka_unit_test(latent_attention_counts_as_megatron_counts_it),
    cmocka_unit_test(golden_configs_are_read_as_their_families_are),
    cmocka_unit_test(experts_have_the_matrices_and_biases_of_their_activation),
    cmocka_unit_test(layers_with_experts_are_counted_or_listed),
    cmocka_unit_test(a_model_cut_to_its_dense_layers_is_dense),
    cmocka_unit_test(layers_without_an_mlp_do_not_split_its_width),
    cmocka_unit_test(own_checkpoints_accept_the_options_that_made_them),
    cmocka_unit_test(a_conversion_needs_no_sequence_length),
    cmocka_unit_test(recomputation_follows_megatron),
    cmocka_unit_test(fp8_follows_megatron),
    cmocka_unit_test(fp8_needs_a_gpu_that_has_it),
    cmocka_unit_test(fp8_recipes_follow_the_compute_capability),
    cmocka_unit_test(a_memory_limit_is_a_number_with_a_unit),
    cmocka_unit_test(offloading_follows_megatron),
    cmocka_unit_test(sparse_attention_that_cannot_be_is_refused),
    cmocka_unit_test(experts_that_cannot_be_are_refused),
    cmocka_unit_test(options_win_over_a_shape_but_not_over_weights),
    cmocka_unit_test(the_model_of_hf_config_must_be_that_of_load),
    cmocka_unit_test(the_latest_checkpoint_of_a_folder_is_described),
    cmocka_unit_test(a_signal_after_a_refusal_adds_no_line),
    cmocka_unit_test(rope_is_read_in_both_forms),
    cmocka_unit_test(yarn_without_rounded_ranges_is_that_of_transformers),
    cmocka_unit_test(windows_are_read_for_each_layer),
    cmocka_unit_test(biases_are_read_apart),
    cmocka_unit_test(bad_configs_are_refused_by_key),
    cmocka_unit_test(what_a_family_cannot_compute_is_refused),
    cmocka_unit_test(tokens_are_the_first_of_a_list),
    cmocka_unit_test(a_key_that_a_family_omits_has_the_familys_default),
    cmocka_unit_test(rope_of_layers_with_a_window_is_read_as_in_transformers),
    cmocka_unit_test(null_is_no_default),
    cmocka_unit_test(a_familys_padding_token_is_written_only_if_the_vocabulary_holds_it),
    cmocka_unit_test(families_keys_set_their_parts),
    cmocka_unit_test(a_schedule_of_many_indexers_is_found_in_its_list),
    cmocka_unit_test(other_arrangements_of_a_family_are_refused),
    cmocka_unit_test(two_names_of_one_thing_must_agree),
    cmocka_unit_test(a_class_that_is_known_stands_for_an_unknown_type),
    cmocka_unit_test(values_of_a_wrong_type_are_refused_with_their_key),
    cmocka_unit_test(bad_steps_have_rules_that_go_together),
    cmocka_unit_test(written_configs_read_back_as_the_same_model),
    cmocka_unit_test(a_preference_with_a_divergence_has_its_weight_and_tokens),
    cmocka_unit_test(what_exceeds_a_backends_limits_is_refused_in_one_line),
    cmocka_unit_test(sizes_that_cudnn_cannot_take_are_refused),
    cmocka_unit_test(a_model_asks_its_backend_for_limits),
    cmocka_unit_test(plain_options_are_the_finished_defaults),
};

int main(void) {
    return cmocka_run_group_tests(tests, NULL, NULL);
}
