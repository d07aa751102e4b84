/* option_finish.c: rules of the option table, and texts that are parsed for the struct. */
#include "option_finish.h"

#include "../base/file.h"
#include "distillation.h"
#include "megatron_names.h"
#include "option_rules.h"
#include "option_table.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* A rule that is broken: names both options, with the choices that it has for them. */
static int mt_option_rule_fail(const mt_run_options *options, const mt_option *row, const mt_option_rule *rule,
                               bool needs, mt_error *error) {
    char name[200], other[200], *value = mt_option_text(options, rule->other), *own = mt_option_text(options, row);
    bool any = !rule->condition || strcmp(rule->condition, "any") == 0;
    const char *choice = any ? "" : row->type == MT_CHOICE ? own : rule->condition;
    bool shows_value = rule->choices && rule->other->type != MT_SET;
    snprintf(name, sizeof name, "--%s%s%s", row->name, any ? "" : " ", choice);
    snprintf(other, sizeof other, "--%s%s%s", rule->other->name, rule->choices ? " " : "",
             rule->choices ? rule->choices : "");
    if (needs)
        mt_error_set(error, "%s needs %s%s%s", name, other, shows_value ? ", not " : "", shows_value ? value : "");
    else
        mt_error_set(error, "%s and %s exclude each other; leave one out", name, other);
    free(value);
    free(own);
    return -1;
}

/* The columns `needs` and `excludes` of all options. An option that was given needs none of the other program. */
static int mt_options_check_columns(const mt_run_options *options, mt_program program, mt_error *error) {
    const int programs = program == MT_PROGRAM_INFER ? MT_INFER : MT_TRAIN;
    mt_option_rule rule;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name) continue;
        for (const char *column = row->needs; mt_option_next_rule(&column, &rule);)
            if ((rule.condition || rule.other->programs & programs) && mt_option_rule_holds(options, row, &rule) &&
                !mt_option_has(options, rule.other, rule.choices))
                return mt_option_rule_fail(options, row, &rule, true, error);
        for (const char *column = row->excludes; mt_option_next_rule(&column, &rule);) {
            if (mt_option_is_form_of(row, rule.other) || mt_option_is_form_of(rule.other, row)) continue;
            bool given = !rule.condition && !rule.choices; // a value that was derived is no contradiction
            if (mt_option_rule_holds(options, row, &rule) &&
                (given ? mt_option_used(options, rule.other) : mt_option_has(options, rule.other, rule.choices)))
                return mt_option_rule_fail(options, row, &rule, false, error);
        }
    }
    return 0;
}

/* moe_layers from --moe-layer-freq. A model of config.json that is given fewer layers keeps the first ones, and is a
 * dense model if none of these has experts. */
static int mt_options_list_expert_layers(mt_run_options *o, mt_error *error) {
    bool given = MT_GIVEN(o, moe_layer_freq);
    mt_string_set(&o->stack.moe_layers, NULL);
    if (o->stack.num_experts == 0 || o->stack.num_layers == 0 || o->stack.hybrid_layers) return 0;
    o->stack.moe_layers = mt_layer_freq_expand(o->moe_layer_freq, MT_EXPERT_LAYERS, o->stack.num_layers, !given, error);
    if (!o->stack.moe_layers) return -1;
    bool dense = !strchr(o->stack.moe_layers, '1');
    if (dense && given)
        return mt_error_set(error, "--moe-layer-freq %.100s gives no layer experts; leave out --num-experts",
                            o->moe_layer_freq);
    if (dense) o->stack.num_experts = 0;
    char *text = dense ? mt_strdup("1") : mt_layer_freq_print(o->stack.moe_layers, MT_EXPERT_LAYERS);
    if (!given && !isdigit((unsigned char)*o->moe_layer_freq)) mt_string_set(&o->moe_layer_freq, text);
    free(text);
    if (dense) mt_string_set(&o->stack.moe_layers, NULL);
    return 0;
}

/* The letters of layers with a property that an option names: none (NULL) if all layers have it, or without the option.
 * `text` is then written as a list of the model's layers. */
static int mt_options_list_layers(char **letters, char **text, bool given, mt_layer_freq_rule rule, int64_t num_layers,
                                  mt_error *error) {
    mt_string_set(letters, NULL);
    if (!*text || num_layers == 0) return 0;
    *letters = mt_layer_freq_expand(*text, rule, num_layers, !given, error);
    if (!*letters) return -1;
    char *list = mt_layer_freq_print(*letters, rule);
    mt_string_set(text, strchr(*letters, '0') ? list : NULL);
    free(list);
    if (!strchr(*letters, '0')) mt_string_set(letters, NULL);
    return 0;
}

/* Layers with a window and with RoPE. A model whose layers all lack them has no window, or no position embedding. */
static int mt_options_list_attention_layers(mt_run_options *o, mt_error *error) {
    if (mt_options_list_layers(&o->stack.window_layers, &o->window_attn_skip_freq, MT_GIVEN(o, window_attn_skip_freq),
                               MT_WINDOW_LAYERS, o->stack.num_layers, error) != 0 ||
        mt_options_list_layers(&o->stack.rope_layers, &o->no_rope_freq, MT_GIVEN(o, no_rope_freq), MT_ROPE_LAYERS,
                               o->stack.num_layers, error) != 0)
        return -1;
    if (o->stack.window_layers && !strchr(o->stack.window_layers, '1')) {
        if (MT_GIVEN(o, window_attn_skip_freq))
            return mt_error_set(error, "--window-attn-skip-freq gives no layer a window; leave it out%s",
                                o->stack.window_size > 0 ? ", and --window-size" : "");
        o->stack.window_size = 0, o->stack.window_rotary_base = 0, o->stack.window_num_query_groups = 0;
        if (o->stack.sinks_in_windows_only)
            o->stack.softmax_type = MT_SOFTMAX_VANILLA, o->stack.sinks_in_windows_only = false;
        mt_string_set(&o->stack.window_layers, NULL), mt_string_set(&o->window_attn_skip_freq, NULL);
    }
    if (o->stack.rope_layers && !strchr(o->stack.rope_layers, '1'))
        return mt_error_set(error, "--no-rope-freq gives no layer RoPE; use --position-embedding-type none");
    return 0;
}

/* Takes the modules of multi-token prediction out of --hybrid-override-pattern, whose layers Megatron puts behind those
 * of the model, each with a / before it: their number, and their layer as --mtp-hybrid-override-pattern. */
static int mt_options_cut_modules(mt_run_options *o, mt_error *error) {
    char *pattern = mt_strdup(o->hybrid_override_pattern), *slash = strchr(pattern, '/'), *letters = slash;
    int64_t modules = 0;
    int status = 0;
    for (char *at = slash, *next; at && status == 0; at = next, modules++) {
        *at++ = 0, next = strchr(at, '/');
        size_t length = next ? (size_t)(next - at) : strlen(at);
        if (modules == 0) letters = at;
        if (strncmp(letters, at, length) != 0 || (modules > 0 && strlen(letters) != length))
            status = mt_error_set(error,
                                  "--hybrid-override-pattern '%.100s' has modules (/) of different layers; make "
                                  "them equal",
                                  o->hybrid_override_pattern);
    }
    if (status == 0 && modules > MT_MAX_MTP_LAYERS)
        status = mt_error_set(error, "--hybrid-override-pattern has %lld modules (/), and %d are possible",
                              (long long)modules, (int)MT_MAX_MTP_LAYERS);
    if (status == 0 && slash && MT_GIVEN(o, stack.mtp_num_layers) && o->stack.mtp_num_layers != modules)
        status = mt_error_set(error,
                              "--hybrid-override-pattern has %lld modules (/), and --mtp-num-layers is %lld; make them "
                              "equal, or leave --mtp-num-layers out",
                              (long long)modules, (long long)o->stack.mtp_num_layers);
    if (status == 0 && slash && MT_GIVEN(o, mtp_hybrid_override_pattern) &&
        strcmp(letters, o->mtp_hybrid_override_pattern) != 0)
        status = mt_error_set(error,
                              "--hybrid-override-pattern has modules '%.60s' (/), and --mtp-hybrid-override-pattern is "
                              "'%.60s'; leave one of them out",
                              letters, o->mtp_hybrid_override_pattern);
    if (status == 0 && slash) {
        o->stack.mtp_num_layers = modules;
        mt_string_set(&o->mtp_hybrid_override_pattern, letters);
        mt_string_set(&o->hybrid_override_pattern, pattern);
    }
    free(pattern);
    return status;
}

/* The layer of a module of a model of --hybrid-override-pattern. */
static int mt_options_list_module(mt_run_options *o, mt_error *error) {
    const char *letters = o->mtp_hybrid_override_pattern;
    mt_layer_kind kind;
    bool known = letters && mt_layer_kind_read(&kind, letters, (int64_t)strlen(letters)) &&
                 (mt_mixer_attends(kind.mixer) || kind.mixer == MT_MIXER_NONE);
    if (o->stack.mtp_num_layers == 0) {
        mt_string_set(&o->mtp_hybrid_override_pattern, NULL);
        return 0;
    }
    if (!known)
        return mt_error_set(
            error,
            "--mtp-hybrid-override-pattern is %.60s%s; a module of multi-token prediction has attention "
            "(*), an MLP (-) or experts (E), or attention and one of these: *E",
            letters ? letters : "missing",
            letters ? "" : ", and --mtp-num-layers with --hybrid-override-pattern needs it");
    if (mt_feed_forward_routes(kind.feed_forward) && mt_num_expert_layers(&o->stack) == 0)
        return mt_error_set(error,
                            "--mtp-hybrid-override-pattern %s has experts (E), and --hybrid-override-pattern has "
                            "none; give its layers some, or leave them out of the modules",
                            letters);
    o->stack.mtp_hybrid_layers = mt_strdup(letters);
    return 0;
}

/* Megatron's | in --hybrid-override-pattern begins a pipeline stage: takes it out and writes the stages as
 * --pipeline-model-parallel-layout. */
static int mt_options_cut_pattern(mt_run_options *o, mt_error *error) {
    if (!strchr(o->hybrid_override_pattern, '|')) return 0;
    if (o->stack.pipeline_model_parallel_size == 1 || o->pipeline_model_parallel_layout)
        return mt_error_set(error, "--hybrid-override-pattern has stages (|): it needs --pipeline-model-parallel-size, "
                                   "and excludes --pipeline-model-parallel-layout");
    char *layout = mt_malloc((int64_t)strlen(o->hybrid_override_pattern) + o->stack.mtp_num_layers + 3), *to = layout;
    char *letters = mt_strdup(o->hybrid_override_pattern), *kept = letters;
    *to++ = 'E';
    for (const char *at = letters; *at; at++) {
        *to++ = *at == '|' ? '|' : 't';
        if (*at != '|') *kept++ = *at;
    }
    for (int64_t i = 0; i < o->stack.mtp_num_layers; i++) *to++ = 'm';
    *to++ = 'L', *to = *kept = 0;
    mt_string_set(&o->pipeline_model_parallel_layout, layout);
    mt_string_set(&o->hybrid_override_pattern, letters);
    free(layout), free(letters);
    return 0;
}

/* The letters of layers with one half: "* (attention), - (MLP)". */
static void mt_half_letters_print(char text[200]) {
    size_t length = 0;
    for (char letter = 1; letter < 127 && length < 200; letter++) {
        mt_layer_kind half;
        if (!mt_layer_kind_read(&half, &letter, 1)) continue;
        bool has_mixer = half.mixer != MT_MIXER_NONE;
        length += (size_t)snprintf(text + length, 200 - length, "%s%c (%s)", length > 0 ? ", " : "", letter,
                                   has_mixer ? mt_mixer_name(half.mixer) : mt_feed_forward_name(half.feed_forward));
    }
}

/* Layers with one half, from --hybrid-override-pattern, which may give their number too. As with lists of layers, a
 * model of config.json that is given fewer layers keeps the first ones. */
static int mt_options_list_hybrid_layers(mt_run_options *o, mt_error *error) {
    mt_string_set(&o->stack.hybrid_layers, NULL), mt_string_set(&o->stack.mtp_hybrid_layers, NULL);
    if (!o->hybrid_override_pattern) return 0;
    if (mt_options_cut_modules(o, error) != 0 || mt_options_cut_pattern(o, error) != 0) return -1;
    const char *pattern = o->hybrid_override_pattern;
    int64_t count = (int64_t)strlen(pattern), layers = o->stack.num_layers > 0 ? o->stack.num_layers : count;
    const char *other = pattern;
    mt_layer_kind half;
    while (mt_layer_kind_read(&half, other, 1)) other++;
    if (*other && strchr("GD+", *other))
        return mt_error_set(error,
                            "--hybrid-override-pattern '%.100s' has %s (%c), which layers with one half do not have "
                            "here; --experimental-attention-variant and --multi-latent-attention have such layers",
                            pattern,
                            *other == 'G'   ? "gated delta nets"
                            : *other == 'D' ? "sparse attention"
                                            : "latent attention",
                            *other);
    if (*other || count == 0) {
        char letters[200];
        mt_half_letters_print(letters);
        return mt_error_set(error, "--hybrid-override-pattern expects a letter for each layer of %s, got '%.100s'",
                            letters, pattern);
    }
    if (count < layers || (count > layers && MT_GIVEN(o, hybrid_override_pattern)))
        return mt_error_set(error,
                            "--hybrid-override-pattern has %lld letters, and --num-layers is %lld; make them equal",
                            (long long)count, (long long)layers);
    o->stack.num_layers = layers;
    o->stack.hybrid_layers = mt_strdup(pattern);
    o->stack.hybrid_layers[layers] = 0;
    mt_string_set(&o->hybrid_override_pattern, o->stack.hybrid_layers);
    bool has_experts = mt_num_expert_layers(&o->stack) > 0;
    if (has_experts && o->stack.num_experts == 0)
        return mt_error_set(error, "--hybrid-override-pattern %.100s has layers of experts (E); give --num-experts",
                            o->stack.hybrid_layers);
    if (!has_experts && o->stack.num_experts > 0 && MT_GIVEN(o, stack.num_experts))
        return mt_error_set(error, "--hybrid-override-pattern %.100s gives no layer experts; leave out --num-experts",
                            o->stack.hybrid_layers);
    if (!has_experts) o->stack.num_experts = 0;
    return mt_options_list_module(o, error);
}

/* An encoder-decoder: its two lengths, and the number of layers of the string (mt_options). A second call changes
 * nothing. */
static int mt_options_list_halves(mt_run_options *o, mt_error *error) {
    mt_options *s = &o->stack;
    int64_t buckets = s->relative_attention_num_buckets, exact = buckets / 2; // of the decoder: a distance each
    if (s->decoder_num_layers == 0) return 0;
    bool is_new = MT_GIVEN(o, stack.num_layers) && !MT_GIVEN(o, stack.encoder_num_layers) &&
                  s->num_layers != s->encoder_num_layers + 2 * s->decoder_num_layers; // not by an earlier call
    if (s->encoder_num_layers == 0 || is_new) s->encoder_num_layers = s->num_layers;
    if (s->encoder_num_layers == 0)
        return mt_error_set(error, "--decoder-num-layers needs the layers of the encoder too: give --num-layers");
    s->num_layers = s->encoder_num_layers + 2 * s->decoder_num_layers;
    if (s->encoder_seq_length == 0) s->encoder_seq_length = s->seq_length;
    if (o->decoder_seq_length > 0) s->seq_length = o->decoder_seq_length;
    if (s->seq_length == 0) s->seq_length = s->encoder_seq_length;
    const mt_constraint rules[] = {
        {buckets % 2 != 0,
         "--relative-attention-num-buckets %lld must be even: the encoder has half of them for each "
         "direction",
         {buckets}},
        {s->relative_attention_max_distance <= exact,
         "--relative-attention-max-distance %lld must be more than half of --relative-attention-num-buckets %lld",
         {s->relative_attention_max_distance, buckets}},
    };
    return MT_CHECK_CONSTRAINTS(rules, error);
}

/* Options of Mamba-2 and of short convolutions need layers that have them. */
static int mt_options_check_mamba(const mt_run_options *o, mt_error *error) {
    static const size_t offsets[] = {MT_AT(stack.mamba_state_dim),    MT_AT(stack.mamba_head_dim),
                                     MT_AT(stack.mamba_num_groups),   MT_AT(stack.mamba_num_heads),
                                     MT_AT(stack.mamba_dt_limit_low), MT_AT(stack.mamba_dt_limit_high),
                                     MT_AT(stack.mamba_conv_bias)};
    static const char *const layers = "--hybrid-override-pattern with an M, or --experimental-attention-variant mamba2";
    bool has_mamba = mt_has_mixer(&o->stack, MT_MIXER_MAMBA2), has_states = mt_has_states(&o->stack);
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++)
        if (!has_mamba && o->stack.num_layers > 0 && mt_options_gave(o, offsets[i]))
            return mt_error_set(error, "--%s needs layers of Mamba-2: %s", mt_option_of(offsets[i])->name, layers);
    if (!has_states && o->stack.num_layers > 0 && MT_GIVEN(o, stack.linear_conv_kernel_dim))
        return mt_error_set(error, "--linear-conv-kernel-dim needs layers with short convolutions: "
                                   "--experimental-attention-variant, or --hybrid-override-pattern with an M");
    if (o->stack.mamba_dt_limit_high > 0 && o->stack.mamba_dt_limit_high < o->stack.mamba_dt_limit_low)
        return mt_error_set(error, "--mamba-dt-limit-high %g is less than --mamba-dt-limit-low %g",
                            o->stack.mamba_dt_limit_high, o->stack.mamba_dt_limit_low);
    return 0;
}

/* Layers of --experimental-attention-variant. */
static int mt_options_list_linear_layers(mt_run_options *o, mt_error *error) {
    mt_string_set(&o->stack.linear_layers, NULL);
    if (o->stack.experimental_attention_variant == MT_VARIANT_GDN)
        o->stack.experimental_attention_variant = MT_VARIANT_GATED_DELTA_NET;
    if (o->stack.num_layers == 0 || !mt_variant_is_listed(o->stack.experimental_attention_variant)) return 0;
    if (!o->linear_attention_freq)
        return mt_error_set(error,
                            "--experimental-attention-variant needs --linear-attention-freq, the layers that have it: "
                            "4 for all but every fourth");
    o->stack.linear_layers = mt_layer_freq_expand(o->linear_attention_freq, MT_LINEAR_LAYERS, o->stack.num_layers,
                                                  !MT_GIVEN(o, linear_attention_freq), error);
    if (!o->stack.linear_layers) return -1;
    if (!strchr(o->stack.linear_layers, '1'))
        return mt_error_set(error,
                            "--linear-attention-freq %.60s gives no layer --experimental-attention-variant; leave "
                            "both out",
                            o->linear_attention_freq);
    char *list = mt_layer_freq_print(o->stack.linear_layers, MT_LINEAR_LAYERS);
    mt_string_set(&o->linear_attention_freq, list);
    free(list);
    return 0;
}

/* Layers of the vision tower as bits. */
static int mt_options_list_vision(const char *option, const mt_strings *words, int64_t num_layers, uint64_t *bits,
                                  mt_error *error) {
    *bits = 0;
    for (int64_t i = 0; i < words->count; i++) {
        int64_t layer;
        if (!mt_parse_int(words->items[i], &layer) || layer < 0 || layer >= num_layers)
            return mt_error_set(error, "--%s %.60s: give layers of the tower, from 0 to %lld", option, words->items[i],
                                (long long)num_layers - 1);
        *bits |= (uint64_t)1 << layer;
    }
    return 0;
}

static int mt_options_list_vision_layers(mt_run_options *o, mt_error *error) {
    mt_vision_options *v = &o->stack.vision;
    if (v->tower == MT_VISION_NONE) return 0;
    int64_t layers = mt_min(v->num_layers, MT_MAX_VISION_LAYERS);
    return mt_options_list_vision("vision-full-attention-layers", &o->vision_full_attention_layers, layers,
                                  &v->full_layers, error) ||
                   mt_options_list_vision("vision-deepstack-layers", &o->vision_deepstack_layers, layers,
                                          &v->deepstack_layers, error)
               ? -1
               : 0;
}

/* The trace's file takes the place of any file with its name. */
static int mt_options_check_trace(const mt_run_options *o, mt_error *error) {
    if (!o->trace || !o->metrics || !mt_path_same(o->metrics, o->trace)) return 0;
    return mt_error_set(error, "--trace %s is the file of --metrics; choose another --trace", o->trace);
}

static int mt_options_check_bad_steps(const mt_run_options *o, mt_error *error) {
    bool stops = o->stack.bad_step_policy == MT_BAD_STEP_STOP, reruns = o->stack.rerun_mode != MT_RERUN_DISABLED;
    bool checks = o->stack.check_for_nan_in_loss_and_grad || o->stack.check_for_spiky_loss;
    if (!checks && (!stops || reruns))
        return mt_error_set(error, "--%s has no effect with --no-check-for-nan-in-loss-and-grad; leave one out",
                            stops ? "rerun-mode" : "bad-step-policy");
    if (o->stack.error_injection_rate > 0 && !o->stack.check_for_nan_in_loss_and_grad)
        return mt_error_set(error, "--error-injection-rate has no effect with --no-check-for-nan-in-loss-and-grad, "
                                   "which finds its faults; leave one out");
    return 0;
}

/* A word of --data-path is the prefix of X.bin and X.idx; people give one of these files, or their text. */
static int mt_options_check_prefix(const char *option, const char *prefix, mt_error *error) {
    static const char *const index = "_text_document.idx";
    bool is_half = mt_text_ends_with(prefix, ".bin") || mt_text_ends_with(prefix, ".idx");
    const char *slash = strrchr(prefix, '/'), *dot = strrchr(slash ? slash : prefix, '.');
    int whole = (int)strlen(prefix), cut = dot ? (int)(dot - prefix) : whole, stem = cut < 200 ? cut : 200;
    struct stat file;
    if (mt_path_exists(prefix, whole, ".idx")) return 0;
    int known = mt_path_exists(prefix, whole, index) ? whole : mt_path_exists(prefix, cut, index) ? cut : 0;
    if (!is_half && known > 0)
        return mt_error_set(error, "--%s %.200s: is not a dataset, but %.*s_text_document is; give that", option,
                            prefix, known, prefix);
    if (is_half)
        return mt_error_set(error, "--%s %.200s: expects the prefix of the two files of a dataset; give %.*s", option,
                            prefix, stem, prefix);
    if (stat(prefix, &file) != 0 || !S_ISREG(file.st_mode)) return 0;
    return mt_error_set(error,
                        "--%s %.200s: is text, not a dataset; first run data/preprocess --input %.200s --output-prefix "
                        "%.*s --tokenizer-type TYPE --tokenizer-model PATH, then give --%s %.*s_text_document",
                        option, prefix, prefix, stem, prefix, option, stem, prefix);
}

static int mt_options_check_prefixes(const mt_run_options *o, mt_error *error) {
    const struct {
        const char *name;
        const mt_strings *paths;
    } lists[] = {{"data-path", &o->data_path},
                 {"train-data-path", &o->train_data_path},
                 {"valid-data-path", &o->valid_data_path},
                 {"test-data-path", &o->test_data_path}};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        for (int64_t j = 0; j < lists[i].paths->count; j++)
            if (mt_options_check_prefix(lists[i].name, lists[i].paths->items[j], error) != 0) return -1;
    return 0;
}

static int mt_options_check_validation_sets(const mt_run_options *o, mt_error *error) {
    int64_t names = o->validation_set_names.count, sets = o->valid_data_path.count;
    char *const *items = o->validation_set_names.items;
    for (int64_t i = 0; i < names; i++) {
        bool good = *items[i] && strlen(items[i]) <= 80;
        for (const char *p = items[i]; *p && good; p++) good = *p >= ' ' && *p < 127 && *p != '"' && *p != '\\';
        if (!good)
            return mt_error_set(error,
                                "--validation-set-names: a name has up to 80 characters of ASCII, no quote "
                                "and no backslash, not '%.80s'",
                                items[i]);
        for (int64_t k = 0; k < i; k++)
            if (strcmp(items[i], items[k]) == 0)
                return mt_error_set(error, "--validation-set-names: two sets are named %s; give each a name of its own",
                                    items[i]);
    }
    if (names == 0 || names == sets) return 0;
    return mt_error_set(error,
                        "--validation-set-names has %lld names, and --valid-data-path %lld sets; make them equal",
                        (long long)names, (long long)sets);
}

/* Names all that a run lacks, where it lacks several kinds of options; the rules of each name one. */
static int mt_options_check_missing(const mt_run_options *o, mt_error *error) {
    bool converts = mt_options_converts(o),
         shaped = o->stack.num_layers > 0 && o->stack.hidden_size > 0 && o->stack.num_attention_heads > 0;
    bool endless = o->stack.train_iters == 0 && o->stack.train_samples == 0;
    bool fed = o->data_path.count > 0 || o->train_data_path.count > 0 || o->mock_data || o->tokens_file;
    const struct {
        bool is_missing;
        const char *names;
    } rows[] = {
        {!shaped, "the model (--load, --hf-config, or --num-layers, --hidden-size and --num-attention-heads)"},
        {o->stack.vocab_size == 0, "its vocabulary (--vocab-size, or --tokenizer-type and --tokenizer-model)"},
        {o->stack.seq_length == 0 && !converts, "--seq-length"},
        {!fed && !converts, "data (--data-path, --train-data-path, --tokens-file or --mock-data)"},
        {endless && !converts, o->sft ? "the length of training (--train-iters, --train-samples or --train-epochs)"
                                      : "the length of training (--train-iters or --train-samples)"},
        {o->stack.lr == 0 && !converts, "--lr"},
    };
    char text[800] = "";
    int kinds = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (!rows[i].is_missing) continue;
        size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "%s%s", kinds > 0 ? "; " : "", rows[i].names);
        kinds++;
    }
    return kinds < 2 ? 0 : mt_error_set(error, "the run lacks %s", text);
}

/* Data of an encoder-decoder. */
static int mt_options_check_mappings(const mt_run_options *o, mt_error *error) {
    const mt_constraint rules[] = {
        {.broken = o->mock_data && o->sft,
         .message = "--mock-data: mock data of an encoder-decoder are no samples of --sft; leave --sft out"},
        {.broken = o->tokens_file != NULL,
         .message = "--tokens-file has no inputs for an encoder; give --data-path or --mock-data"},
        {.broken = o->reset_position_ids || o->reset_attention_mask,
         .message =
             "--reset-position-ids and --reset-attention-mask: a sample of an encoder-decoder is of one document; "
             "leave them out"},
        {.broken = o->eod_mask_loss,
         .message = "--eod-mask-loss: targets of an encoder-decoder end with the end of document; leave it out"},
        {.broken = o->fim_data, .message = "--fim-data: an encoder-decoder has masked spans instead; leave it out"},
        {.broken = o->variable_seq_lengths,
         .message = "--variable-seq-lengths: micro-batches of an encoder-decoder have whole rows so far; leave it out, "
                    "and take --sequence-packing"},
        {o->stack.max_position_embeddings > 0 && o->stack.seq_length > o->stack.max_position_embeddings,
         "--decoder-seq-length %lld is more than --max-position-embeddings %lld",
         {o->stack.seq_length, o->stack.max_position_embeddings}},
    };
    return MT_CHECK_CONSTRAINTS(rules, error);
}

static int mt_options_check_data(const mt_run_options *o, mt_error *error) {
    if (mt_options_converts(o)) return 0;
    int sources = (o->data_path.count > 0) + (o->train_data_path.count > 0) + o->mock_data + (o->tokens_file != NULL);
    if (sources != 1)
        return mt_error_set(error, "give one source of data: --data-path, --train-data-path, --tokens-file or "
                                   "--mock-data");
    bool cuts = !o->sft && (o->reset_position_ids || o->reset_attention_mask);
    if ((cuts || o->eod_mask_loss) && !o->tokenizer_type && !o->load)
        return mt_error_set(error, "--%s needs --tokenizer-type, which knows the end of a document",
                            cuts && o->reset_position_ids ? "reset-position-ids"
                            : cuts                        ? "reset-attention-mask"
                                                          : "eod-mask-loss");
    if (o->stack.decoder_num_layers > 0 && mt_options_check_mappings(o, error) != 0) return -1;
    if (mt_options_check_validation_sets(o, error) != 0) return -1;
    return o->sft ? 0 : mt_options_check_prefixes(o, error);
}

/* --prompt-tokens "1,2,3": tokens of the vocabulary. */
static int mt_options_check_prompt_tokens(const mt_run_options *o, mt_error *error) {
    for (const char *at = o->prompt_tokens; at;) {
        char *end;
        errno = 0;
        long long token = strtoll(at, &end, 10);
        if (!*at && at > o->prompt_tokens)
            return mt_error_set(error,
                                "--prompt-tokens %.100s ends with a comma; give a number behind it, or leave it out",
                                o->prompt_tokens);
        if (!isdigit((unsigned char)*at) || (*end && *end != ','))
            return mt_error_set(error, "--prompt-tokens expects numbers with commas between them, got '%.100s'", at);
        if (errno != 0 || token >= o->stack.vocab_size)
            return mt_error_set(error, "--prompt-tokens: %.*s is outside the vocabulary of %lld",
                                (int)mt_min(end - at, 100), at, (long long)o->stack.vocab_size);
        at = *end ? end + 1 : NULL;
    }
    return 0;
}

static int mt_options_check_infer(const mt_run_options *o, mt_error *error) {
    if (!o->load) return mt_error_set(error, "--load is missing: the folder of the model to run");
    if (o->score && !o->out && !o->entropy_out && !o->logits_out)
        return mt_error_set(error, "--score needs --out, --entropy-out or --logits-out");
    bool prompted = o->prompts || o->prompt_tokens || o->prompt.count > 0;
    if (o->out && !o->score && !prompted)
        return mt_error_set(error, "--out needs --score, --prompt, --prompts or --prompt-tokens");
    if (o->num_return_sequences > 1 && !prompted)
        return mt_error_set(error, "--num-return-sequences needs --prompt, --prompts or --prompt-tokens");
    if (o->image.count > 0 && !o->chat && o->prompt.count == 0)
        return mt_error_set(error, "--image needs --prompt or --chat: the message that the pictures go with");
    bool of_chat = MT_GIVEN(o, chat_template) || o->chat_template_kwargs;
    if (of_chat && !o->chat && !o->score && !o->prompts && !o->serve && o->image.count == 0)
        return mt_error_set(error, "--chat-template%s needs --chat, --prompts, --image, --serve or --score",
                            o->chat_template_kwargs ? "-kwargs" : "");
    const char *idle = o->chat ? "chat" : o->serve ? "serve" : o->score ? "score" : o->prompts ? "prompts" : NULL;
    if (o->stack.decoder_num_layers > 0 && idle)
        return mt_error_set(error,
                            "--%s: an encoder-decoder answers --prompt, --prompt-tokens and lines of standard input "
                            "so far; leave it out",
                            idle);
    if (o->score && o->stack.seq_length == 0 && !mt_options_score_samples(o))
        return mt_error_set(error, "--seq-length is missing: --score needs it for sequences of int32 tokens");
    return 0;
}

static int mt_options_unfold_layout(mt_run_options *o, int64_t world_size, mt_stage_balancer *balance,
                                    mt_error *error) {
    free(o->stack.pipeline_letters);
    o->stack.pipeline_letters = NULL;
    if (!o->pipeline_model_parallel_layout) return 0;
    const char *layout = o->pipeline_model_parallel_layout;
    bool is_auto = strncmp(layout, "auto", 4) == 0;
    if (is_auto && !balance)
        return mt_error_set(error, "--pipeline-model-parallel-layout %s: ./train balances stages; give letters",
                            layout);
    o->stack.pipeline_letters = is_auto ? balance(o, world_size, error) : mt_pipeline_layout_unfold(layout, error);
    return o->stack.pipeline_letters ? 0 : -1;
}

/* --use-rope-scaling and --rotary-seq-len-interpolation-factor are other names of two types of scaling. */
static int mt_options_resolve_rope(mt_run_options *o, mt_error *error) {
    int64_t factor = o->rotary_seq_len_interpolation_factor;
    mt_rope_scaling asked = o->use_rope_scaling ? MT_ROPE_SCALING_LLAMA3
                            : factor > 0        ? MT_ROPE_SCALING_LINEAR
                                                : MT_ROPE_SCALING_NONE;
    if (asked && MT_GIVEN(o, stack.rope_scaling_type) && asked != o->stack.rope_scaling_type) {
        char *type = mt_option_text(o, mt_option_of(MT_AT(stack.rope_scaling_type)));
        mt_error_set(error, "--rope-scaling-type %s and --%s exclude each other; leave one out", type,
                     o->use_rope_scaling ? "use-rope-scaling" : "rotary-seq-len-interpolation-factor");
        free(type);
        return -1;
    }
    if (asked) o->stack.rope_scaling_type = asked;
    if (factor > 0 && MT_GIVEN(o, stack.rope_scaling_factor) && o->stack.rope_scaling_factor != (double)factor)
        return mt_error_set(
            error,
            "--rope-scaling-factor %g and --rotary-seq-len-interpolation-factor %lld exclude each other "
            "unless they agree; leave one out",
            o->stack.rope_scaling_factor, (long long)factor);
    if (factor > 0 && !MT_GIVEN(o, stack.rope_scaling_factor)) o->stack.rope_scaling_factor = (double)factor;
    return 0;
}

/* Options that stand for values of others, and defaults that rules of the table read. */
static int mt_options_resolve(mt_run_options *o, mt_program program, mt_error *error) {
    if (mt_options_resolve_rope(o, error) != 0 || mt_options_read_distillation(o, error) != 0) return -1;
    mt_strategy *strategy = &o->stack.data_parallel_sharding_strategy;
    bool distributed = *strategy == MT_NO_SHARD && o->use_distributed_optimizer;
    if (distributed && MT_GIVEN(o, stack.data_parallel_sharding_strategy))
        return mt_error_set(error, "--use-distributed-optimizer and --data-parallel-sharding-strategy no_shard exclude "
                                   "each other; leave one out");
    if (distributed) *strategy = MT_SHARD_OPTIM;
    if (o->ckpt_format == MT_CHECKPOINT_FSDP_DTENSOR && program == MT_PROGRAM_INFER)
        return mt_error_set(error, "--ckpt-format fsdp_dtensor is not written by --convert; take torch_dist, or leave "
                                   "the option out");
    if (o->ckpt_format == MT_CHECKPOINT_FSDP_DTENSOR && *strategy == MT_NO_SHARD)
        return mt_error_set(error,
                            "--ckpt-format fsdp_dtensor is the format of --use-megatron-fsdp; give that, or leave "
                            "the option out");
    if (o->ckpt_format == MT_CHECKPOINT_FSDP_DTENSOR) o->ckpt_format = MT_CHECKPOINT_HF;
    if (o->convert && o->ckpt_format == MT_CHECKPOINT_TORCH)
        return mt_error_set(error, "--ckpt-format torch: that format is read only; --convert writes huggingface, or "
                                   "torch_dist");
    if (o->stack.stage != MT_STAGE_PT && o->kd_data == MT_KD_OF_SFT) o->sft = true;
    if (o->ipo && MT_GIVEN(o, preference_loss) && o->preference_loss != MT_PREFERENCE_IPO)
        return mt_error_set(error, "--ipo and --preference-loss exclude each other unless that is ipo; leave one out");
    if (o->ipo) o->preference_loss = MT_PREFERENCE_IPO;
    if (o->train_epochs > 0 && o->stack.train_iters == 0) o->stack.train_iters = MT_UNKNOWN_ITERATIONS;
    bool full = o->stack.recompute_granularity == MT_RECOMPUTE_FULL; // which the table refuses with both flags
    if ((o->recompute_activations || o->moe_layer_recompute) && !full)
        o->stack.recompute_granularity = MT_RECOMPUTE_SELECTIVE;
    if (o->moe_layer_recompute && !full) o->stack.recompute_modules |= MT_MODULE_MOE;
    bool routes = program != MT_PROGRAM_INFER && mt_has_experts(&o->stack) && o->stack.tensor_model_parallel_size > 1;
    if (!routes || o->stack.sequence_parallel) return 0;
    if (MT_GIVEN(o, stack.sequence_parallel))
        return mt_error_set(error, "--num-experts with --tensor-model-parallel-size of 2 or more needs "
                                   "--sequence-parallel: each rank routes tokens of its own");
    if (o->stack.distribute_saved_activations)
        return mt_error_set(error, "--distribute-saved-activations is not supported with --num-experts and "
                                   "--tensor-model-parallel-size, which use --sequence-parallel; leave it out");
    o->stack.sequence_parallel = true;
    return 0;
}

bool mt_options_score_samples(const mt_run_options *options) {
    return mt_text_ends_with(options->score, ".jsonl") || mt_text_ends_with(options->score, ".parquet");
}

bool mt_options_draws_schedule(const mt_run_options *options) {
    return options->print_schedule && !options->stack.dynamic_context_parallel;
}

void mt_options_take_vocabulary(mt_run_options *o) {
    if (!o->vocab_file || !o->merge_file || o->tokenizer_model) return;
    if (o->tokenizer_type == MT_TOKENIZER_AUTO) o->tokenizer_type = MT_TOKENIZER_GPT2_BPE;
    size_t length = strlen(o->vocab_file) + strlen(o->merge_file) + 2;
    o->tokenizer_model = mt_malloc((int64_t)length);
    snprintf(o->tokenizer_model, length, "%s,%s", o->vocab_file, o->merge_file);
}

int mt_options_open_tokenizer(mt_tokenizer **out, const mt_run_options *o, mt_error *error) {
    mt_tiktoken_settings settings = {o->tiktoken_pattern, o->tiktoken_num_special_tokens, 131072}; // as in Megatron-LM
    if (MT_GIVEN(o, stack.vocab_size)) settings.vocab_size = o->stack.vocab_size;
    if (o->vocab_file && o->merge_file && o->tokenizer_type != MT_TOKENIZER_GPT2_BPE)
        return mt_error_set(error,
                            "--vocab-file and --merge-file are for --tokenizer-type GPT2BPETokenizer; give that, "
                            "or name the tokenizer by --tokenizer-model");
    if (o->tokenizer_type != MT_TOKENIZER_TIKTOKEN)
        return mt_tokenizer_open(out, o->tokenizer_type, o->tokenizer_model, error);
    return mt_tokenizer_open_tiktoken(out, o->tokenizer_model, &settings, error);
}

/* In Megatron-LM, RoPE of latent attention is scaled by YaRN, from 4096 positions, wherever a factor is given. */
static void mt_options_scale_latent_rope(mt_run_options *o) {
    bool has_factor = mt_is_latent(&o->stack) && MT_GIVEN(o, stack.rope_scaling_factor);
    if (!has_factor || o->use_rope_scaling || MT_GIVEN(o, stack.rope_scaling_type) ||
        o->stack.rope_scaling_type != MT_ROPE_SCALING_NONE)
        return;
    o->stack.rope_scaling_type = MT_ROPE_SCALING_YARN;
    if (o->stack.original_max_position_embeddings == 0) o->stack.original_max_position_embeddings = 4096;
}

/* True if the option was set by another name of it. */
static bool mt_options_set_by(const mt_run_options *o, const char *option, const char *name) {
    for (int64_t i = 0; i < o->typed_names.count; i += 2)
        if (strcmp(o->typed_names.items[i], option) == 0 && strstr(o->typed_names.items[i + 1], name)) return true;
    return false;
}

void mt_options_drop_attention_backend(mt_run_options *o) {
    mt_attention_backend *backend = &o->stack.attention_backend;
    if (*backend != MT_ATTENTION_UNFUSED && *backend != MT_ATTENTION_CUDNN) return;
    o->ignores_attention_backend = *backend;
    *backend = MT_ATTENTION_AUTO;
}

/* Arguments of a file of Megatron-LM that have no effect without another one, which is absent: Megatron-LM ignores
 * them. mt_options_warn notes them. */
static void mt_options_drop_unmet(mt_run_options *o, mt_program program) {
    mt_option_rule rule;
    if (!o->config_is_arguments || o->strict_options || program != MT_PROGRAM_TRAIN) return;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || mt_option_line(o, row) <= 0) continue;
        bool is_unmet = false;
        for (const char *column = row->needs; !is_unmet && mt_option_next_rule(&column, &rule);)
            is_unmet = !rule.condition && rule.other->programs & MT_TRAIN && mt_option_rule_holds(o, row, &rule) &&
                       !mt_option_has(o, rule.other, rule.choices);
        if (!is_unmet) continue;
        char needed[160];
        snprintf(needed, sizeof needed, "--%.60s%s%.80s", rule.other->name, rule.choices ? " " : "",
                 rule.choices ? rule.choices : "");
        mt_strings_add(&o->unmet_arguments, row->name);
        mt_strings_add(&o->unmet_arguments, needed);
        mt_option_reset(o, row);
        row = mt_option_table; // options that need it have no effect either
    }
}

/* Values that Megatron-LM or transformers ignores as well have no effect; mt_options_warn notes them. */
static void mt_options_drop_ignored(mt_run_options *o) {
    bool by_steps = o->stack.train_iters > 0 && mt_options_set_by(o, "train-iters", "max-steps");
    if (by_steps && o->train_epochs > 0 && mt_options_set_by(o, "train-epochs", "num-train-epochs"))
        mt_option_reset(o, mt_option_of(MT_AT(train_epochs))), o->ignores_train_epochs = true;
    // of Megatron-LM, whose latent attention has RoPE with it too
    if (mt_is_latent(&o->stack) && o->stack.position_embedding_type == MT_POSITION_NONE &&
        mt_options_set_by(o, "position-embedding-type", "no-position-embedding)"))
        o->stack.position_embedding_type = MT_POSITION_ROPE;
    bool no_softmax = o->stack.num_experts > 0 && o->stack.moe_router_score_function != MT_SCORE_SOFTMAX;
    if (o->stack.sequence_parallel && o->stack.tensor_model_parallel_size == 1)
        o->stack.sequence_parallel = false, o->ignores_sequence_parallel = true;
    if (o->stack.moe_router_pre_softmax && no_softmax && MT_GIVEN(o, stack.moe_router_pre_softmax))
        o->stack.moe_router_pre_softmax = false, o->ignores_pre_softmax = true;
    if (o->stack.first_last_layers_bf16 && o->stack.fp8_format == MT_FP8_OFF) {
        o->stack.first_last_layers_bf16 = false, o->ignores_first_last_layers_bf16 = true;
        mt_option_reset(o, mt_option_of(MT_AT(stack.num_layers_at_start_in_bf16)));
        mt_option_reset(o, mt_option_of(MT_AT(stack.num_layers_at_end_in_bf16)));
    }
    // of Megatron-Core, whose latent attention rotates neighbouring channels
    bool is_begun_here = !o->load && !o->hf_config && mt_is_latent(&o->stack);
    if (is_begun_here && o->save && o->ckpt_format == MT_CHECKPOINT_TORCH_DIST &&
        !MT_GIVEN(o, stack.rotary_interleaved))
        o->stack.rotary_interleaved = true;
    bool has_no_cudnn = o->config_is_arguments && o->stack.attention_dropout > 0 && // Megatron-LM's has dropout
                        o->stack.attention_backend == MT_ATTENTION_CUDNN;
    if (o->device == MT_DEVICE_CPU || has_no_cudnn) mt_options_drop_attention_backend(o);
    const mt_option *interval = mt_option_of(MT_AT(save_interval));
    if (o->save_interval > 0 && !o->save) mt_option_reset(o, interval), o->ignores_save_interval = true;
    if (o->stack.num_experts == 0 && MT_GIVEN(o, stack.expert_tensor_parallel_size))
        o->stack.expert_tensor_parallel_size = 1;
    if (o->mock_data && o->data_path.count == 0 && MT_GIVEN(o, split)) mt_string_set(&o->split, "969,30,1");
}

/* In Megatron-LM, gradients of fp16 are summed in fp16, unless --accumulate-allreduce-grads-in-fp32, which is false of
 * --grad-reduce-in-bf16. Optimizers other than Adam read fp32. */
static bool mt_options_reduces_in_fp16(const mt_run_options *o) {
    return o->stack.fp16 && o->stack.optimizer == MT_OPTIMIZER_ADAMW && !MT_GIVEN(o, grad_reduce_in_bf16) &&
           !MT_GIVEN(o, stack.main_grads_dtype);
}

static int mt_options_check_fp16(const mt_run_options *o, mt_error *error) {
    if (o->stack.min_loss_scale > o->stack.initial_loss_scale)
        return mt_error_set(error, "--min-loss-scale %g must be at most --initial-loss-scale %g",
                            o->stack.min_loss_scale, o->stack.initial_loss_scale);
    if (o->stack.pipeline_schedule == MT_SCHEDULE_ZB_H1 && mt_options_reduces_in_fp16(o))
        return mt_error_set(error, "--pipeline-schedule zb-h1 with --fp16 needs --accumulate-allreduce-grads-in-fp32");
    return 0;
}

int mt_options_memory_limit(const mt_run_options *options, int64_t *bytes, mt_error *error) {
    static const struct {
        const char *name;
        double bytes;
    } units[] = {{"GiB", 0x1p30}, {"MiB", 0x1p20}, {"GB", 1e9}, {"MB", 1e6}};
    char *unit = NULL;
    const char *text = options->memory_limit;
    *bytes = 0;
    if (!text) return 0;
    double number = isdigit((unsigned char)*text) ? strtod(text, &unit) : 0;
    for (size_t i = 0; unit && i < sizeof units / sizeof *units; i++)
        if (strcmp(unit, units[i].name) == 0 && number * units[i].bytes < 0x1p62)
            *bytes = (int64_t)(number * units[i].bytes);
    if (*bytes >= 1 << 20) return 0;
    return mt_error_set(
        error, "--memory-limit %.100s: give a number of at least 1MiB with GiB, MiB, GB or MB, as 15GiB", text);
}

int mt_options_complete(mt_run_options *options, mt_program program, int64_t world_size, mt_stage_balancer *balance,
                        mt_error *error) {
    mt_options_take_vocabulary(options);
    mt_options_drop_ignored(options);
    mt_options_scale_latent_rope(options);
    if (mt_options_check_fp16(options, error) != 0) return -1;
    if (mt_options_memory_limit(options, &options->stack.memory_limit, error) != 0) return -1;
    if (options->grad_reduce_in_bf16) options->stack.main_grads_dtype = MT_OPTIMIZER_BF16;
    if (mt_options_reduces_in_fp16(options)) options->stack.main_grads_dtype = MT_OPTIMIZER_FP16;
    if (mt_options_check_ranges(options, program, error) || mt_options_list_halves(options, error)) return -1;
    if (mt_options_list_hybrid_layers(options, error) || mt_options_list_expert_layers(options, error) ||
        mt_options_list_attention_layers(options, error) || mt_options_list_linear_layers(options, error) ||
        mt_options_list_vision_layers(options, error) || mt_options_check_mamba(options, error))
        return -1;
    if (mt_options_resolve(options, program, error)) return -1;
    mt_options_drop_unmet(options, program);
    if (mt_options_check_columns(options, program, error)) return -1;
    if (mt_options_unfold_layout(options, world_size, balance, error)) return -1;
    if (mt_options_draws_schedule(options)) return mt_options_derive(options, program, world_size, error);
    if (program == MT_PROGRAM_INFER && mt_options_check_infer(options, error)) return -1;
    if (program == MT_PROGRAM_TRAIN && mt_options_check_missing(options, error)) return -1;
    if (program == MT_PROGRAM_TRAIN && mt_options_check_data(options, error)) return -1;
    return mt_options_derive(options, program, world_size, error);
}

int mt_options_check_run(const mt_run_options *options, mt_program program, mt_error *error) {
    if (program == MT_PROGRAM_INFER) return mt_options_check_prompt_tokens(options, error);
    return mt_options_check_trace(options, error) || mt_options_check_bad_steps(options, error) ? -1 : 0;
}
