/* adapter.c: adapter_config.json of peft, and which matrices have adapters. */
#include "adapter.h"

#include "../base/file.h"
#include "../base/safetensors.h"
#include "../models/special_tokens.h"
#include "../options/option_rules.h"
#include "../options/option_table.h"
#include "../tokens/tokenizer.h"
#include "checkpoint_folder.h"
#include "resume.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef MT_HAVE_PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#endif

/* Begins a target that is a pattern, as peft has it where target_modules is one text. */
#define MT_TARGET_REGEX "regex:"

/* ---- targets */

/* True if the target is a module's name, or its last words: the part after a dot. */
static bool mt_target_matches(const char *target, const char *module) {
    size_t length = strlen(target), all = strlen(module);
    if (all < length || strcmp(module + all - length, target) != 0) return false;
    return all == length || module[all - length - 1] == '.';
}

/* The last word of a module's name. */
static const char *mt_module_word(const char *module) {
    const char *dot = strrchr(module, '.');
    return dot ? dot + 1 : module;
}

/* The source of the targets, for messages. */
static const char *mt_target_source(const mt_run_options *o, char text[300]) {
    bool given = !o->load_adapter || mt_options_gave(o, MT_AT(lora_target));
    snprintf(text, 300, "--lora-target");
    if (!given)
        snprintf(text, 300, "--load-adapter %.200s: \"target_modules\" of adapter_config.json", o->load_adapter);
    return text;
}

/* A target as its source has it: the mark of a pattern is --lora-target's. */
static const char *mt_target_text(const mt_run_options *o, const char *target) {
    bool given = !o->load_adapter || mt_options_gave(o, MT_AT(lora_target));
    return !given && strncmp(target, MT_TARGET_REGEX, strlen(MT_TARGET_REGEX)) == 0 ? target + strlen(MT_TARGET_REGEX)
                                                                                    : target;
}

/* Why a matrix of the model that a target names has no adapter here; "" if it names none. */
static void mt_target_excuse(char excuse[300], const char *target, const mt_param *rows, int64_t count) {
    char module[160];
    *excuse = 0;
    for (int64_t i = 0; i < count && !*excuse; i++) {
        mt_param_module(module, &rows[i]);
        if (rows[i].can_adapt || mt_param_is_adapter(&rows[i]) || !mt_target_matches(target, module)) continue;
        const char *kind = rows[i].vision_part >= 0             ? "a convolution in transformers, without an adapter"
                           : rows[i].layer < 0                  ? "outside the layers, where nothing has an adapter"
                           : !rows[i].is_linear                 ? "no matrix of a linear layer"
                           : rows[i].linear == MT_LINEAR_ROUTER ? "a router or a gate, whose product has no adapter"
                           : rows[i].unit == MT_UNIT_EXPERTS    ? "the matrix of all experts of a layer in one tensor"
                                                                : "a matrix of several parts, which have no adapters";
        snprintf(excuse, 300, "%s is %s here", module, kind);
    }
}

/* No matrix has this name: names the nearest one and all others. */
static int mt_target_refuse(const mt_run_options *o, const char *target, const mt_param *rows, int64_t count,
                            mt_error *error) {
    char words[512] = "", module[160] = "", nearest[200] = "", source[300], excuse[300];
    int best = 3; // edits
    for (int64_t i = 0; i < count; i++) {
        if (!rows[i].can_adapt) continue;
        mt_param_module(module, &rows[i]);
        const char *word = mt_module_word(module);
        char listed[200];
        snprintf(listed, sizeof listed, " %s", word);
        const char *at = strstr(words, listed);
        if (at && (at[strlen(listed)] == 0 || at[strlen(listed)] == ',')) continue;
        size_t used = strlen(words);
        snprintf(words + used, sizeof words - used, "%s %s", used ? "," : "", word);
        char dashed[160]; // mt_edit_distance compares with a dash
        snprintf(dashed, sizeof dashed, "%s", word);
        for (char *c = dashed; *c; c++)
            if (*c == '_') *c = '-';
        int edits = mt_edit_distance(target, strlen(target), dashed);
        if (edits < best) best = edits, snprintf(nearest, sizeof nearest, "; did you mean %s?", word);
    }
    if (strncmp(target, MT_TARGET_REGEX, strlen(MT_TARGET_REGEX)) == 0)
        return mt_error_set(error,
                            "%s %.200s: the pattern matches the whole name of no matrix of this model that can have an "
                            "adapter, such as %s",
                            mt_target_source(o, source), mt_target_text(o, target), module);
    bool given = !o->load_adapter || mt_options_gave(o, MT_AT(lora_target));
    mt_target_excuse(excuse, target, rows, count);
    if (*excuse && given)
        return mt_error_set(error, "%s %.100s: %s; leave it out (others:%s)", mt_target_source(o, source), target,
                            excuse, words);
    if (*excuse)
        return mt_error_set(error,
                            "%s %.100s: %s; merge the adapter into its base by peft's merge_and_unload, and load that",
                            mt_target_source(o, source), target, excuse);
    return mt_error_set(error, "%s %.200s: no matrix of this model that can have an adapter has this name%s (%s)",
                        mt_target_source(o, source), target, nearest, words + 1);
}

/* 1 if a pattern matches the whole text, 0 if not; -1 with error, which begins with a verb. */
static int mt_pattern_match(const char *pattern, const char *text, mt_error *error) {
#ifdef MT_HAVE_PCRE2
    int code;
    PCRE2_SIZE offset;
    PCRE2_UCHAR why[256];
    pcre2_code *regex = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED,
                                      PCRE2_UTF | PCRE2_ANCHORED | PCRE2_ENDANCHORED, &code, &offset, NULL);
    if (!regex) {
        pcre2_get_error_message(code, why, sizeof why);
        return mt_error_set(error, "is no pattern of PCRE2: %s, at character %lld", (char *)why, (long long)offset);
    }
    pcre2_match_data *match = pcre2_match_data_create_from_pattern(regex, NULL);
    int status = pcre2_match(regex, (PCRE2_SPTR)text, strlen(text), 0, 0, match, NULL);
    pcre2_match_data_free(match), pcre2_code_free(regex);
    if (status >= 0 || status == PCRE2_ERROR_NOMATCH) return status >= 0;
    pcre2_get_error_message(status, why, sizeof why);
    return mt_error_set(error, "PCRE2 gave up on %s: %s; simplify the pattern", text, (char *)why);
#else
    (void)pattern, (void)text;
    return mt_error_set(error, "is a pattern, which needs PCRE2; install libpcre2-dev and run make, or list the names "
                               "of the matrices");
#endif
}

/* Marks the matrices whose whole module names match a pattern; returns their number, or -1. */
static int64_t mt_target_match_pattern(const char *pattern, const mt_param *rows, int64_t count, bool *named,
                                       mt_error *error) {
    char module[160];
    int64_t found = 0;
    for (int64_t i = 0; i < count && found >= 0; i++) {
        if (!rows[i].can_adapt) continue;
        mt_param_module(module, &rows[i]);
        int matches = mt_pattern_match(pattern, module, error);
        named[i] |= matches > 0;
        found = matches < 0 ? -1 : found + matches;
    }
    return found;
}

/* The module of a row of the parameter table. */
typedef struct mt_module {
    char name[160];
    int64_t row;
} mt_module;

static int mt_module_compare(const void *a, const void *b) {
    return strcmp(((const mt_module *)a)->name, ((const mt_module *)b)->name);
}

/* The modules that can have adapters, by name: peft may list each module of thousands. */
static mt_module *mt_modules_sort(const mt_param *rows, int64_t count, int64_t *found) {
    mt_module *modules = mt_malloc(mt_max(count, 1) * (int64_t)sizeof *modules);
    *found = 0;
    for (int64_t i = 0; i < count; i++) {
        if (!rows[i].can_adapt) continue;
        mt_param_module(modules[*found].name, &rows[i]);
        modules[(*found)++].row = i;
    }
    if (*found > 0) qsort(modules, (size_t)*found, sizeof *modules, mt_module_compare);
    return modules;
}

/* Marks the module with a whole name; false: there is none, and the target may be the end of names. */
static bool mt_module_mark(const mt_module *modules, int64_t count, const char *target, bool *named) {
    int64_t low = 0, high = count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (strcmp(modules[middle].name, target) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    bool found = low < count && strcmp(modules[low].name, target) == 0;
    for (; low < count && strcmp(modules[low].name, target) == 0; low++) named[modules[low].row] = true;
    return found;
}

/* Marks the matrices that a target names. Parts of the model that --freeze-vision or --freeze-projector keeps are left
 * out, unless the target names matrices of these alone. */
static int mt_target_add(const mt_run_options *o, const char *target, const mt_param *rows, int64_t count, bool *named,
                         mt_error *error) {
    bool all = strcmp(target, "all-linear") == 0, is_pattern = strncmp(target, MT_TARGET_REGEX, 6) == 0;
    char module[160], source[300];
    int64_t found = 0;
    mt_error why;
    if (is_pattern) found = mt_target_match_pattern(target + 6, rows, count, named, &why);
    if (found < 0)
        return mt_error_set(error, "%s %.200s: %s", mt_target_source(o, source), mt_target_text(o, target), why.text);
    for (int frozen = 0; frozen < 2 && !is_pattern && found == 0; frozen++)
        for (int64_t i = 0; i < count; i++) {
            mt_param_module(module, &rows[i]);
            if (!rows[i].can_adapt || !(all || mt_target_matches(target, module))) continue;
            if (mt_param_is_frozen(&o->stack, &rows[i]) != frozen) continue;
            named[i] = true, found++;
        }
    return found > 0 ? 0 : mt_target_refuse(o, target, rows, count, error);
}

/* ---- adapter_config.json */

/* Features of peft that change what an adapter computes, and the values without them. */
static const struct {
    const char *key, *without, *is;
} mt_peft_features[] = {
    {"use_dora", "false", "DoRA"},
    {"use_qalora", "false", "QALoRA"},
    {"use_bdlora", "null|false", "block-diagonal LoRA"},
    {"bias", "\"none\"", "trained biases"},
    {"lora_bias", "false", "a bias of B"},
    {"modules_to_save", "null|[]", "whole modules beside the adapters"},
    {"layer_replication", "null|[]", "replicated layers"},
    {"trainable_token_indices", "null|[]", "trained tokens"},
    {"alora_invocation_tokens", "null|[]", "activated LoRA"},
    {"arrow_config", "null", "arrow routing"},
    {"monteclora_config", "null", "MonteCLoRA"},
    {"velora_config", "null", "VeLoRA"},
    {"kasa_config", "null", "KaSA"},
    {"task_type", "null|\"CAUSAL_LM\"|\"SEQ_2_SEQ_LM\"", "another model than a language model"},
    {"init_lora_weights", "true|false|\"gaussian\"|\"eva\"|\"orthogonal\"|null",
     "an initialisation that changes the base weights"},
};

/* True if a value, printed, is one of "a|b|c". NULL, a key that is not there, is none. */
static bool mt_json_is_one_of(const json_t *value, const char *choices) {
    char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
    bool found = text && mt_choice_index(choices, text) >= 0;
    free(text);
    return found;
}

/* Adapters of parameters without a module: experts in one tensor, and routers, as peft 0.21 has them for the models of
 * transformers 5. One A serves an expert's gate and up there, and the routers' products have adapters. */
static int mt_peft_check_parameters(const json_t *json, const char *path, mt_error *error) {
    const json_t *names = json_object_get(json, "target_parameters"), *name;
    char *text = NULL;
    size_t size, i;
    if (!names || mt_json_is_one_of(names, "null|[]")) return 0;
    if (!json_is_array(names))
        return mt_error_set(error, "%s: \"target_parameters\" must be a list of names; correct the file", path);
    FILE *file = open_memstream(&text, &size);
    MT_CHECK(file);
    json_array_foreach(names, i, name) {
        const char *word = json_string_value(name) ? json_string_value(name) : "";
        const char *lacks = mt_text_ends_with(word, "gate_up_proj") ? "one A for gate and up, which here have one each"
                            : mt_text_ends_with(word, "down_proj")  ? "the experts of a layer in one pair of matrices"
                            : mt_text_ends_with(word, "gate.weight") || mt_text_ends_with(word, "router.weight")
                                ? "a router, whose product has no adapter here"
                                : "a parameter without a module";
        fprintf(file, "%s%.80s (%s)", i > 0 ? ", " : "", word, lacks);
    }
    MT_CHECK(fclose(file) == 0);
    mt_error_set(error,
                 "%s: \"target_parameters\" asks for adapters that this program does not have: %.500s; merge them into "
                 "the base by peft's merge_and_unload and load that, or train adapters of attention",
                 path, text);
    free(text);
    return -1;
}

static int mt_peft_check(const json_t *json, const char *path, mt_error *error) {
    if (!mt_json_is_one_of(json_object_get(json, "peft_type"), "\"LORA\""))
        return mt_error_set(error, "%s: \"peft_type\" is not \"LORA\", the only adapters of this program", path);
    for (size_t i = 0; i < sizeof mt_peft_features / sizeof *mt_peft_features; i++) {
        const json_t *value = json_object_get(json, mt_peft_features[i].key);
        if (value && !mt_json_is_one_of(value, mt_peft_features[i].without))
            return mt_error_set(error,
                                "%s: \"%s\" asks for %s, which this program does not have; merge the adapter into its "
                                "base by peft's merge_and_unload, and load that",
                                path, mt_peft_features[i].key, mt_peft_features[i].is);
    }
    return mt_peft_check_parameters(json, path, error);
}

static bool mt_json_lists(const json_t *list, const char *name) {
    for (size_t i = 0; i < json_array_size(list); i++)
        if (strcmp(json_string_value(json_array_get(list, i)), name) == 0) return true;
    return false;
}

/* ---- adapters that differ from matrix to matrix. The rules are peft's (tuners_utils.py, check_target_module_exists;
 * utils/other.py, get_pattern_key). */

struct mt_adapter_file {
    json_t *json;
    char *path;
    bool leaves_out_experts; // see mt_adapter_leaves_out_experts
};

/* True if the file has adapters of MLPs and none of experts. In transformers 5 experts are no modules, so that the
 * names of peft's "target_modules" are those of dense layers and shared experts alone. */
static bool mt_adapter_leaves_out_experts(const char *folder) {
    mt_safetensors *set;
    mt_error ignored; // who loads the tensors reports it
    bool has_mlp = false, has_experts = false;
    if (mt_safetensors_open_folder(&set, folder, "adapter_model", &ignored) != 0) return false;
    for (int64_t i = 0; i < mt_safetensors_count(set); i++) {
        const char *name = mt_safetensors_get(set, i)->name;
        has_mlp |= strstr(name, ".mlp.") != NULL;
        has_experts |= strstr(name, ".experts.") != NULL;
    }
    mt_safetensors_close(set);
    return has_mlp && !has_experts;
}

mt_adapter_file *mt_adapter_file_open(const char *folder, mt_error *error) {
    mt_adapter_file *file = mt_calloc(sizeof *file);
    file->path = mt_path_join(folder, "adapter_config.json");
    file->json = mt_json_read(file->path, error);
    file->leaves_out_experts = mt_adapter_leaves_out_experts(folder);
    if (file->json && mt_peft_check(file->json, file->path, error) == 0) return file;
    mt_adapter_file_close(file);
    return NULL;
}

void mt_adapter_file_close(mt_adapter_file *file) {
    if (!file) return;
    json_decref(file->json);
    free(file->path);
    free(file);
}

/* True for an empty value, which is none. */
static bool mt_json_is_empty(const json_t *value) {
    return !value || json_is_null(value) || json_is_false(value) ||
           (json_is_array(value) && json_array_size(value) == 0) ||
           (json_is_object(value) && json_object_size(value) == 0) ||
           (json_is_string(value) && json_string_length(value) == 0);
}

/* 1 if a key of the file, a pattern or a list of names, names a module; 0 if not; -1 with error. */
static int mt_peft_names(const mt_adapter_file *file, const char *key, const char *module, mt_error *error) {
    const json_t *names = json_object_get(file->json, key), *name;
    size_t i;
    mt_error why;
    if (json_is_string(names)) {
        int matches = mt_pattern_match(json_string_value(names), module, &why);
        return matches >= 0 ? matches : mt_error_set(error, "%s: \"%s\" %s", file->path, key, why.text);
    }
    json_array_foreach(names, i, name) {
        if (mt_target_matches(json_string_value(name), module)) return 1;
    }
    return 0;
}

/* The number of a module's layer: 3 in "model.layers.3.mlp.up_proj", where "layers_pattern", if any, names "layers";
 * -1: none. */
static int64_t mt_peft_layer(const mt_adapter_file *file, const char *module) {
    const json_t *patterns = json_object_get(file->json, "layers_pattern");
    bool any = mt_json_is_empty(patterns);
    for (const char *dot = strchr(module, '.'), *before = module; dot; before = dot + 1, dot = strchr(dot + 1, '.')) {
        char word[160];
        if (dot[1] < '0' || dot[1] > '9' || (any && before == module)) continue;
        snprintf(word, sizeof word, "%.*s", (int)(dot - before), before);
        bool named = any || (json_is_string(patterns) && strcmp(json_string_value(patterns), word) == 0) ||
                     mt_json_lists(patterns, word);
        if (named) return atoll(dot + 1);
    }
    return -1;
}

/* True if target_modules is a pattern; peft takes "all-linear" as a list of names. */
static bool mt_peft_targets_by_pattern(const json_t *json) {
    const char *targets = json_string_value(json_object_get(json, "target_modules"));
    return targets && strcmp(targets, "all-linear") != 0;
}

/* False if "layers_to_transform" lists other layers; peft asks it for lists of names, not for a pattern. */
static bool mt_peft_has_layer(const mt_adapter_file *file, const char *module) {
    const json_t *layers = json_object_get(file->json, "layers_to_transform"), *number;
    size_t i;
    if (mt_json_is_empty(layers) || mt_peft_targets_by_pattern(file->json)) return true;
    int64_t layer = mt_peft_layer(file, module);
    if (json_is_integer(layers)) return layer == json_integer_value(layers);
    json_array_foreach(layers, i, number) {
        if (layer == json_integer_value(number)) return true;
    }
    return false;
}

/* The value of the first pattern that a module's name ends with, behind a dot; `fallback` if there is none. NULL with
 * error. */
static const json_t *mt_peft_pattern(const mt_adapter_file *file, const char *key, const char *module,
                                     const json_t *fallback, mt_error *error) {
    json_t *patterns = json_object_get(file->json, key), *value;
    const char *pattern;
    json_object_foreach(patterns, pattern, value) {
        mt_error why;
        int64_t room = (int64_t)strlen(pattern) + 16;
        char *whole = mt_malloc(room);
        snprintf(whole, (size_t)room, "(?:.*\\.)?(?:%s)", pattern);
        bool is_plain =
            strspn(pattern, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") == strlen(pattern);
        int matches = is_plain ? mt_target_matches(pattern, module) : mt_pattern_match(whole, module, &why);
        free(whole);
        if (matches < 0) mt_error_set(error, "%s: \"%s\" of \"%s\" %s", file->path, pattern, key, why.text);
        if (matches != 0) return matches < 0 ? NULL : value;
    }
    return fallback;
}

int mt_adapter_file_find(const mt_adapter_file *file, const mt_param *row, mt_adapter_shape *shape, mt_error *error) {
    char module[160];
    const json_t *json = file->json;
    *shape = (mt_adapter_shape){.exists = false};
    mt_param_module(module, row);
    if (mt_param_is_adapter(row)) { // "base_model.model.MODULE.lora_A"
        memmove(module, module + strlen("base_model.model."), strlen(module) - strlen("base_model.model.") + 1);
        *strrchr(module, '.') = 0;
    }
    bool all = json_is_string(json_object_get(json, "target_modules")) && !mt_peft_targets_by_pattern(json);
    int named = all ? 1 : mt_peft_names(file, "target_modules", module, error);
    int excluded = mt_peft_names(file, "exclude_modules", module, error);
    if (named < 0 || excluded < 0) return -1;
    const json_t *rank = mt_peft_pattern(file, "rank_pattern", module, json_object_get(json, "r"), error);
    const json_t *alpha = mt_peft_pattern(file, "alpha_pattern", module, json_object_get(json, "lora_alpha"), error);
    if (!rank || !alpha) return -1;
    bool by_root = json_is_true(json_object_get(json, "use_rslora"));
    double r = (double)json_integer_value(rank);
    bool in_file = row->expert < 0 || !file->leaves_out_experts;
    shape->exists = named && !excluded && in_file && mt_peft_has_layer(file, module);
    shape->rank = json_integer_value(rank), shape->scale = json_number_value(alpha) / (by_root ? sqrt(r) : r);
    return 0;
}

/* Sets an option from the file; one that was given must agree. */
static int mt_peft_take(mt_run_options *o, size_t offset, const char *text, bool overrides, const char *path,
                        mt_error *error) {
    const mt_option *row = mt_option_of(offset);
    if (mt_options_gave(o, offset)) {
        char *given = mt_option_text(o, row);
        mt_run_options other = {0};
        int status = mt_option_set(&other, row, text, path, error);
        char *own = status == 0 ? mt_option_text(&other, row) : NULL;
        if (status == 0 && !overrides && strcmp(given, own) != 0)
            status = mt_error_set(error, "--%s %s: the adapter of %s has %s; %s", row->name, given, path, own,
                                  o->auto_resume ? "give that" : "leave the option out");
        mt_option_clear(&other, row);
        free(given), free(own);
        return status;
    }
    uint64_t given[sizeof o->given / sizeof *o->given];
    memcpy(given, o->given, sizeof given);
    mt_option_clear(o, row);
    int status = mt_option_set(o, row, text, path, error);
    memcpy(o->given, given, sizeof given);
    return status;
}

/* target_modules for --lora-target: names with commas between them, or a pattern. To free; NULL with error. */
static char *mt_peft_targets(const json_t *modules, const char *path, mt_error *error) {
    if (json_is_string(modules) && strcmp(json_string_value(modules), "all-linear") == 0)
        return mt_strdup("all-linear");
    size_t count = json_array_size(modules);
    int64_t room = (int64_t)(sizeof MT_TARGET_REGEX + json_string_length(modules)), used = 0;
    bool good = json_string_length(modules) > 0 || count > 0;
    for (size_t i = 0; i < count && good; i++) {
        const char *name = json_string_value(json_array_get(modules, i));
        good = name && *name && !strchr(name, ',');
        room += good ? (int64_t)strlen(name) + 1 : 0;
    }
    if (!good) {
        char *value = json_dumps(modules, JSON_COMPACT | JSON_ENCODE_ANY);
        mt_error_set(
            error,
            "%s: \"target_modules\" must be a list of modules' names, a pattern, or \"all-linear\", not %.100s; "
            "correct the file",
            path, value ? value : "absent");
        free(value);
        return NULL;
    }
    char *text = mt_malloc(room);
    if (json_is_string(modules)) sprintf(text, MT_TARGET_REGEX "%s", json_string_value(modules));
    for (size_t i = 0; i < count; i++)
        used += sprintf(text + used, "%s%s", i > 0 ? "," : "", json_string_value(json_array_get(modules, i)));
    return text;
}

/* True where the adapters of two matrices may differ, or their scale is another one than alpha / rank. */
static bool mt_peft_differs(const json_t *json) {
    static const char *const keys[] = {"use_rslora", "rank_pattern", "alpha_pattern", "exclude_modules",
                                       "layers_to_transform"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!mt_json_is_empty(json_object_get(json, keys[i]))) return true;
    // a pattern may match the matrices of some layers, and names may be whole ones
    const json_t *targets = json_object_get(json, "target_modules"), *name;
    size_t i;
    if (mt_peft_targets_by_pattern(json)) return true;
    json_array_foreach(targets, i, name) {
        if (strchr(json_string_value(name), '.')) return true;
    }
    return false;
}

/* True for null, a whole number, or a list of these or of texts. */
static bool mt_peft_is_list(const json_t *value, bool of_texts) {
    const json_t *item;
    size_t i;
    if (mt_json_is_empty(value) || (of_texts ? json_is_string(value) : json_is_integer(value))) return true;
    json_array_foreach(value, i, item) {
        if (of_texts ? !json_is_string(item) : !json_is_integer(item)) return false;
    }
    return json_is_array(value);
}

/* Checks the values of the keys by which adapters differ. */
static int mt_peft_check_patterns(const json_t *json, const char *path, mt_error *error) {
    static const struct {
        const char *key, *wanted;
        bool of_texts;
    } lists[] = {{"layers_to_transform", "a layer's number or a list of them", false},
                 {"layers_pattern", "a name or a list of names", true},
                 {"exclude_modules", "a pattern or a list of modules' names", true}};
    const char *pattern;
    json_t *value;
    int64_t rank;
    json_object_foreach(json_object_get(json, "rank_pattern"), pattern, value) {
        if (!mt_json_int(value, 1, 65536, &rank))
            return mt_error_set(error, "%s: \"rank_pattern\": the rank of \"%.100s\" must be a positive whole number",
                                path, pattern);
    }
    json_object_foreach(json_object_get(json, "alpha_pattern"), pattern, value) {
        if (!(json_number_value(value) > 0))
            return mt_error_set(error, "%s: \"alpha_pattern\": the value of \"%.100s\" must be a positive number", path,
                                pattern);
    }
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        if (!mt_peft_is_list(json_object_get(json, lists[i].key), lists[i].of_texts))
            return mt_error_set(error, "%s: \"%s\" must be %s; correct the file", path, lists[i].key, lists[i].wanted);
    return 0;
}

/* Reports fields that this program does not know; most versions of peft add one. Those of training and of other values
 * of init_lora_weights change nothing here. */
static void mt_peft_warn(const json_t *json, const char *path) {
    static const char known[] =
        "peft_type|peft_version|auto_mapping|base_model_name_or_path|revision|inference_mode|r|target_modules|"
        "exclude_modules|lora_alpha|lora_dropout|fan_in_fan_out|use_rslora|layers_to_transform|layers_pattern|"
        "rank_pattern|alpha_pattern|target_parameters|megatron_config|megatron_core|loftq_config|eva_config|corda_"
        "config|"
        "lora_ga_config|qalora_group_size|ensure_weight_tying|runtime_config";
    char unknown[300] = "";
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)json, key, value) {
        bool is_feature = false;
        for (size_t i = 0; i < sizeof mt_peft_features / sizeof *mt_peft_features; i++)
            is_feature |= strcmp(key, mt_peft_features[i].key) == 0;
        if (is_feature || mt_json_is_empty(value) || mt_choice_index(known, key) >= 0) continue;
        size_t used = strlen(unknown);
        snprintf(unknown + used, sizeof unknown - used, "%s\"%.60s\"", used ? ", " : "", key);
    }
    if (*unknown && mt_launch_rank() <= 0)
        fprintf(stderr,
                "warning: %s: %s: not known to this program, and without effect here; peft may compute something "
                "else with it\n",
                path, unknown);
}

/* Checks the numbers of the file, and that its matrices are transposed as the model's. */
static int mt_peft_check_values(const mt_options *o, const json_t *json, int64_t *rank, const char *path,
                                mt_error *error) {
    static const mt_json_field fields[] = {
        {"r", MT_JSON_INT, "a whole number"},
        {"lora_alpha", MT_JSON_NUMBER, "a number"},
        {"lora_dropout", MT_JSON_NUMBER, "a number"},
        {"fan_in_fan_out", MT_JSON_BOOL, "true or false"},
        {"use_rslora", MT_JSON_BOOL, "true or false"},
        {"rank_pattern", MT_JSON_OBJECT, "an object of names and ranks"},
        {"alpha_pattern", MT_JSON_OBJECT, "an object of names and numbers"},
    };
    const json_t *alpha = json_object_get(json, "lora_alpha"), *dropout = json_object_get(json, "lora_dropout");
    double p = json_number_value(dropout);
    if (mt_json_check_fields(json, fields, sizeof fields / sizeof *fields, path, error) != 0) return -1;
    if (!mt_json_int(json_object_get(json, "r"), 1, 65536, rank) || !(json_number_value(alpha) > 0))
        return mt_error_set(error, "%s: \"r\" and \"lora_alpha\" must be positive numbers", path);
    if (mt_peft_check_patterns(json, path, error) != 0) return -1;
    if (!(p >= 0 && p < 1))
        return mt_error_set(error, "%s: \"lora_dropout\" must be a number from 0 to less than 1", path);
    if (json_is_true(json_object_get(json, "fan_in_fan_out")) && !mt_hf_families[o->hf_family].transposed)
        return mt_error_set(error,
                            "%s: \"fan_in_fan_out\" is true, which is for the matrices of GPT-2; this model has none "
                            "of them: set it to false, or load the adapter's own base",
                            path);
    return 0;
}

static int mt_adapter_read_config(mt_run_options *o, const char *folder, mt_error *error) {
    char *path = mt_path_join(folder, "adapter_config.json"), rank[32], real[32];
    int64_t r;
    json_t *json = mt_json_read(path, error);
    int status = json ? mt_peft_check(json, path, error) : -1;
    const json_t *alpha = json_object_get(json, "lora_alpha"), *dropout = json_object_get(json, "lora_dropout");
    if (status == 0) status = mt_peft_check_values(&o->stack, json, &r, path, error);
    char *targets = status == 0 ? mt_peft_targets(json_object_get(json, "target_modules"), path, error) : NULL;
    if (targets) {
        snprintf(rank, sizeof rank, "%lld", (long long)r);
        status = mt_peft_take(o, MT_AT(stack.lora_rank), rank, false, path, error);
        mt_real_print(real, json_number_value(alpha));
        if (status == 0) status = mt_peft_take(o, MT_AT(stack.lora_alpha), real, false, path, error);
        mt_real_print(real, json_number_value(dropout));
        if (status == 0) status = mt_peft_take(o, MT_AT(stack.lora_dropout), real, true, path, error);
        if (status == 0)
            status = mt_peft_take(o, MT_AT(lora_target), targets, true, path, error); // the loader compares tensors
    } else {
        status = -1;
    }
    if (status == 0) mt_peft_warn(json, path);
    free(targets), free(path);
    json_decref(json);
    return status;
}

/* The folder with the files of --load-adapter, to free; NULL with error. */
static char *mt_adapter_folder(const mt_run_options *o, mt_error *error) {
    return mt_options_falls_back(o) ? mt_checkpoint_resolve_whole(o->load_adapter, error)
                                    : mt_checkpoint_resolve(o->load_adapter, error);
}

int mt_adapter_read_options(mt_run_options *o, mt_error *error) {
    if (!o->load_adapter) return 0;
    char *folder = mt_adapter_folder(o, error);
    int status = folder ? 0 : -1;
    if (folder && !mt_folder_has(folder, "adapter_config.json") && mt_folder_has(folder, "config.json"))
        status =
            o->auto_resume && mt_options_falls_back(o)
                ? mt_error_set(error,
                               "--auto-resume: the run of --save %s has no adapters; leave out --lora-rank to continue "
                               "it, or give the adapter another --save",
                               o->save)
                : mt_error_set(error,
                               "--load-adapter %s: holds a whole model, not an adapter; name it by --load, and leave "
                               "out --lora-rank to continue its run, or give the adapter another --save",
                               o->load_adapter);
    if (status == 0) status = mt_adapter_read_config(o, folder, error);
    if (status == 0) status = mt_generation_config_add_ends(o, folder, error); // of its chat template
    free(folder);
    return status;
}

/* Only tokenizers that can be read here are compared. */
static int mt_adapter_compare_tokenizers(const char *adapter, const char *model, mt_error *error) {
    mt_error cause;
    mt_tokenizer *own = NULL, *base = NULL;
    bool both =
        mt_tokenizer_open_folder(&own, adapter, &cause) == 0 && mt_tokenizer_open_folder(&base, model, &cause) == 0;
    int status = both && mt_tokenizer_compare(own, base, &cause) != 0 ? -1 : 0;
    if (status != 0)
        mt_error_set(error, "--load-adapter: %s; name the tokenizer by --tokenizer-type and --tokenizer-model",
                     cause.text);
    mt_tokenizer_close(own);
    mt_tokenizer_close(base);
    return status;
}

char *mt_adapter_tokenizer_folder(const mt_run_options *o, const char *model_folder, mt_error *error) {
    if (!o->load_adapter || o->tokenizer_type) return mt_strdup(model_folder);
    char *folder = mt_adapter_folder(o, error);
    if (!folder) return NULL;
    if (mt_folder_has_tokenizer(folder)) {
        if (mt_adapter_compare_tokenizers(folder, model_folder, error) == 0) return folder;
        free(folder);
        return NULL;
    }
    free(folder);
    return mt_strdup(model_folder);
}

/* ---- which matrices have adapters */

/* The roles of the named matrices; all matrices of a role must be named, unless a file gives `some`. */
static int mt_targets_take(mt_run_options *o, const mt_param *rows, int64_t count, const bool *named, bool some,
                           mt_error *error) {
    char with[160], without[160], source[300];
    const mt_param *first[MT_NUM_ROLES] = {0};
    for (int64_t i = 0; i < count; i++) {
        if (!named[i]) continue;
        o->stack.lora_roles[rows[i].role / 64] |= (uint64_t)1 << rows[i].role % 64;
        if (!first[rows[i].role]) first[rows[i].role] = &rows[i];
    }
    for (int64_t i = 0; i < count && !some; i++) {
        if (named[i] || !rows[i].can_adapt || !mt_role_has_adapters(&o->stack, rows[i].role)) continue;
        mt_param_module(with, first[rows[i].role]), mt_param_module(without, &rows[i]);
        return mt_error_set(error,
                            "%s: names %s but not %s; adapters of some layers or experts only are not supported; name "
                            "all by %s",
                            mt_target_source(o, source), with, without, mt_module_word(with));
    }
    return 0;
}

/* Leaves of the named matrices those to which the file of --load-adapter gives adapters, and takes the largest rank,
 * and the first scale, of these. */
static int mt_targets_read(mt_run_options *o, const mt_param *rows, int64_t count, bool *named, mt_error *error) {
    char *folder = mt_adapter_folder(o, error);
    mt_adapter_file *file = folder ? mt_adapter_file_open(folder, error) : NULL;
    bool any = false, differ = file && (mt_peft_differs(file->json) || file->leaves_out_experts);
    int status = file ? 0 : -1;
    int64_t rank = 0;
    double scale = 0;
    for (int64_t i = 0; i < count && status == 0 && differ; i++) {
        mt_adapter_shape shape;
        if (!named[i]) continue;
        status = mt_adapter_file_find(file, &rows[i], &shape, error);
        named[i] = status == 0 && shape.exists;
        if (!named[i]) continue;
        if (!any) scale = shape.scale;
        any = true, rank = mt_max(rank, shape.rank);
    }
    if (any) o->stack.lora_rank = rank, o->stack.lora_alpha = scale * (double)rank;
    if (status == 0 && differ && !any)
        status = mt_error_set(error,
                              "%s: \"exclude_modules\" and \"layers_to_transform\" leave no matrix of this model an "
                              "adapter; load the adapter's own base",
                              file->path);
    mt_adapter_file_close(file);
    free(folder);
    return status;
}

int mt_options_derive_adapters(mt_run_options *o, mt_error *error) {
    mt_param *rows;
    int status = 0;
    bool adapts_experts = false;
    memset(o->stack.lora_roles, 0, sizeof o->stack.lora_roles);
    if (o->stack.lora_rank == 0) return 0;
    if (o->stack.head_type != MT_HEAD_LM)
        return mt_error_set(error, "--lora-rank: a value head is not trained with adapters; leave out the adapter, or "
                                   "take a language model");
    if (o->stack.lora_alpha == 0) o->stack.lora_alpha = (double)o->stack.lora_rank;
    int64_t count = mt_params_build(&rows, &o->stack, NULL);
    bool *named = mt_calloc(count * (int64_t)sizeof *named);
    int64_t num_modules;
    mt_module *modules = mt_modules_sort(rows, count, &num_modules);
    for (int64_t i = 0; i < o->lora_target.count && status == 0; i++) {
        char *words = mt_strdup(o->lora_target.items[i]), *rest = NULL;
        const char *between = strncmp(words, MT_TARGET_REGEX, 6) == 0 ? "" : ",";
        for (char *word = strtok_r(words, between, &rest); word && status == 0; word = strtok_r(NULL, between, &rest))
            if (!mt_module_mark(modules, num_modules, word, named)) // a whole name is the end of no other
                status = mt_target_add(o, word, rows, count, named, error);
        free(words);
    }
    free(modules);
    bool of_file = o->load_adapter && !mt_options_gave(o, MT_AT(lora_target));
    if (status == 0 && of_file) status = mt_targets_read(o, rows, count, named, error);
    if (status == 0) status = mt_targets_take(o, rows, count, named, of_file, error);
    for (int64_t i = 0; i < count; i++) adapts_experts |= named[i] && rows[i].unit == MT_UNIT_EXPERTS;
    free(rows), free(named);
    if (status == 0 && !o->stack.lora_roles[0] && !o->stack.lora_roles[1])
        status = mt_error_set(error, "--lora-rank needs --lora-target: all-linear, or names such as q_proj,v_proj");
    if (status == 0 && o->stack.lora_dropout > 0 && adapts_experts)
        status =
            mt_error_set(error, "--lora-dropout: adapters of experts have no dropout, as in peft; leave it out, or "
                                "name other matrices by --lora-target");
    return status;
}

/* True if the end of a name also names a matrix without an adapter, as c_proj of GPT-2's attention and MLP, or "0" of a
 * merger's "mlp.0", which names layers too. */
static bool mt_target_strays(const mt_options *o, const char *target, const mt_param *rows, int64_t count) {
    char module[160];
    if (strspn(target, "0123456789") == strlen(target)) return true;
    for (int64_t i = 0; i < count; i++) {
        bool of_patches = rows[i].vision_part >= 0 && rows[i].is_linear && !mt_param_is_adapter(&rows[i]);
        if (!(rows[i].can_adapt || of_patches) || mt_role_has_adapters(o, rows[i].role)) continue;
        mt_param_module(module, &rows[i]);
        if (mt_target_matches(target, module)) return true;
    }
    return false;
}

/* The modules with adapters by the last words of their names, and more words where these name others too: each once. */
static json_t *mt_peft_modules(const mt_options *o) {
    mt_param *rows;
    char module[160];
    json_t *modules = json_array();
    int64_t count = mt_params_build(&rows, o, NULL);
    for (int64_t i = 0; i < count; i++) {
        if (!rows[i].can_adapt || !mt_role_has_adapters(o, rows[i].role)) continue;
        mt_param_module(module, &rows[i]);
        const char *name = mt_module_word(module);
        while (name > module && !mt_json_lists(modules, name) && mt_target_strays(o, name, rows, count))
            for (name -= 2; name > module && name[-1] != '.';) name--; // one word more
        if (!mt_json_lists(modules, name)) json_array_append_new(modules, json_string(name));
    }
    free(rows);
    return modules;
}

char *mt_adapter_print_config(const mt_run_options *o) {
    json_t *json = json_object();
    mt_json_set_string(json, "peft_type", "LORA");
    mt_json_set_string(json, "task_type", o->stack.decoder_num_layers > 0 ? "SEQ_2_SEQ_LM" : "CAUSAL_LM");
    if (o->load)
        mt_json_set_string(json, "base_model_name_or_path", o->load);
    else
        json_object_set_new(json, "base_model_name_or_path", json_null());
    mt_json_set_int(json, "r", o->stack.lora_rank);
    mt_json_set_real(json, "lora_alpha", o->stack.lora_alpha);
    mt_json_set_real(json, "lora_dropout", o->stack.lora_dropout);
    json_object_set_new(json, "target_modules", mt_peft_modules(&o->stack));
    mt_json_set_string(json, "bias", "none");
    mt_json_set_bool(json, "fan_in_fan_out", mt_hf_families[o->stack.hf_family].transposed);
    mt_json_set_bool(json, "inference_mode", true);
    mt_json_set_bool(json, "init_lora_weights", true);
    json_object_set_new(json, "modules_to_save", json_null());
    mt_json_set_bool(json, "use_dora", false);
    mt_json_set_bool(json, "use_rslora", false);
    char *text = mt_json_print(json);
    json_decref(json);
    return text;
}

void mt_adapter_print_left_out(const mt_run_options *o, FILE *out) {
    bool all = false;
    char module[160];
    mt_param *rows;
    for (int64_t i = 0; i < o->lora_target.count; i++) all |= strcmp(o->lora_target.items[i], "all-linear") == 0;
    if (o->stack.lora_rank == 0 || !all) return;
    json_t *words = json_array();
    int64_t count = mt_params_build(&rows, &o->stack, NULL);
    for (int64_t i = 0; i < count; i++) {
        bool is_linear = rows[i].is_linear && rows[i].linear != MT_LINEAR_ROUTER && !mt_param_is_adapter(&rows[i]);
        if (rows[i].can_adapt || !is_linear || rows[i].layer < 0 || rows[i].layer >= o->stack.num_layers) continue;
        mt_param_module(module, &rows[i]);
        if (!mt_json_lists(words, mt_module_word(module)))
            json_array_append_new(words, json_string(mt_module_word(module)));
    }
    for (size_t i = 0; i < json_array_size(words); i++)
        fprintf(out, "%s%s", i == 0 ? "--lora-target all-linear leaves out " : ", ",
                json_string_value(json_array_get(words, i)));
    if (json_array_size(words) > 0) fprintf(out, ": no adapters of these here\n");
    json_decref(words);
    free(rows);
}

void mt_adapter_warn(const mt_options *o, FILE *out) {
    mt_param *rows;
    char module[160] = "";
    // peft asks for the family: a DeepSeek-V3 without experts is treated alike
    if (o->lora_rank == 0 || (!mt_has_experts(o) && o->hf_family != MT_HF_DEEPSEEK_V3)) return;
    int64_t count = mt_params_build(&rows, o, NULL);
    for (int64_t i = 0; i < count && !*module; i++) {
        if (!rows[i].can_adapt || !mt_role_has_adapters(o, rows[i].role) || rows[i].unit == MT_UNIT_EXPERTS) continue;
        bool of_mlp = strstr(rows[i].hf_name, ".mlp.") || strstr(rows[i].hf_name, ".block_sparse_moe.");
        if (of_mlp) mt_param_module(module, &rows[i]);
    }
    free(rows);
    if (!*module) return;
    fprintf(
        out,
        "warning: peft (0.21) drops a part of the adapters of MLPs of a family with experts, those of experts or the "
        "others, such as %s; this program loads them; for other programs merge them by infer --merge-adapter, or name "
        "matrices of attention alone by --lora-target\n",
        module);
}
