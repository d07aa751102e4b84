/* distillation.c: see distillation.h. */
#include "distillation.h"

#include "option_reader.h"
#include "option_rules.h"
#include "option_table.h"
#include "yaml.h"

#include <jansson.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- the file of --export-kd-cfg */

typedef struct mt_kd_file {
    mt_run_options *options;
    const char *path;
    mt_error *error;
} mt_kd_file;

/* Gives an option the value of the file's `key`. */
static int mt_kd_set(const mt_kd_file *file, const char *key, size_t offset, const char *value) {
    const mt_option *row = mt_option_of(offset);
    mt_error cause;
    if (mt_options_gave(file->options, offset))
        return mt_error_set(file->error, "%s: %s and --%s exclude each other; leave one out", file->path, key,
                            row->name);
    if (mt_options_set(file->options, row->name, value, &cause) == 0) return 0;
    return mt_error_set(file->error, "%s: %s: %s", file->path, key, cause.text);
}

static int mt_kd_number(const mt_kd_file *file, const char *key, size_t offset, const json_t *value) {
    char text[40];
    if (json_is_null(value)) return 0;
    if (!json_is_number(value)) return mt_error_set(file->error, "%s: %s expects a number", file->path, key);
    snprintf(text, sizeof text, "%.17g", json_number_value(value));
    if (!mt_option_in_range(mt_option_of(offset), json_number_value(value)))
        return mt_error_set(file->error, "%s: %s must be in %s, got %s", file->path, key, mt_option_of(offset)->values,
                            text);
    return mt_kd_set(file, key, offset, text);
}

/* intermediate_layer_pairs: [[student, teacher], [student, teacher, type], ...] */
static int mt_kd_pairs(const mt_kd_file *file, const char *key, const json_t *pairs) {
    char text[4096] = "";
    size_t length = 0, i, k;
    json_t *pair, *word;
    json_array_foreach(pairs, i, pair) {
        json_array_foreach(pair, k, word) {
            const char *name = json_string_value(word);
            size_t room = sizeof text - length;
            if (name && strpbrk(name, ": \t\n")) name = NULL;
            int n = snprintf(text + length, room, "%s%s", k > 0 ? ":" : length > 0 ? " " : "", name ? name : "");
            if (!name || n < 0 || (size_t)n >= room)
                return mt_error_set(file->error, "%s: %s has a value that names no layer", file->path, key);
            length += (size_t)n;
        }
        if (k < 2 || k > 3)
            return mt_error_set(file->error, "%s: %s expects [student, teacher] or [student, teacher, type]",
                                file->path, key);
    }
    return length > 0 ? mt_kd_set(file, key, MT_AT(kd_hidden_layers), text) : 0;
}

static int mt_kd_logits(const mt_kd_file *file, const json_t *layers) {
    for (size_t i = 0; i < 2; i++) {
        const char *name = json_string_value(json_array_get(layers, i));
        if (!name || strcmp(name, "output_layer") != 0 || json_array_size(layers) != 2)
            return mt_error_set(file->error, "%s: logit_layers expects [output_layer, output_layer]", file->path);
    }
    return 0;
}

static int mt_kd_key(const mt_kd_file *file, const char *key, const json_t *value) {
    if (strcmp(key, "intermediate_layer_pairs") == 0)
        return json_is_array(value) ? mt_kd_pairs(file, key, value)
                                    : mt_error_set(file->error, "%s: %s expects a list", file->path, key);
    if (strcmp(key, "logit_layers") == 0) return mt_kd_logits(file, value);
    if (strcmp(key, "logit_kl_temperature") == 0) return mt_kd_number(file, key, MT_AT(kd_temperature), value);
    if (strcmp(key, "logit_kl_topk") == 0) return mt_kd_number(file, key, MT_AT(logits_topk), value);
    if (strcmp(key, "skip_lm_loss") == 0 || strcmp(key, "kd_loss_scale") == 0) return 0; // mt_kd_balance
    return mt_error_set(file->error,
                        "%s: %.100s is not supported; the file has intermediate_layer_pairs, logit_layers, "
                        "skip_lm_loss, kd_loss_scale, logit_kl_temperature and logit_kl_topk",
                        file->path, key);
}

/* skip_lm_loss and kd_loss_scale; the latter has an effect beside the language model's loss only. */
static int mt_kd_balance(const mt_kd_file *file, const json_t *keys) {
    const json_t *skip = json_object_get(keys, "skip_lm_loss"), *scale = json_object_get(keys, "kd_loss_scale");
    bool skips = !skip || json_is_true(skip);
    if (skip && !json_is_boolean(skip))
        return mt_error_set(file->error, "%s: skip_lm_loss expects true or false", file->path);
    if (mt_kd_set(file, "skip_lm_loss", MT_AT(kd_balance), skips ? "hidden" : "all") != 0) return -1;
    if (!skips && scale) return mt_kd_number(file, "kd_loss_scale", MT_AT(kd_loss_scale), scale);
    if (scale && json_number_value(scale) != 1 && mt_launch_rank() == 0)
        fprintf(stderr, "warning: %s: kd_loss_scale has no effect: skip_lm_loss leaves out the loss beside it\n",
                file->path);
    return 0;
}

static int mt_kd_file_read(mt_kd_file *file) {
    mt_yaml yaml = {0};
    int status = mt_yaml_open_file(&yaml, file->path, MT_YAML_BYTES - 1, file->error);
    json_t *keys = status == 0 && yaml.root ? mt_yaml_json(&yaml, yaml.root) : NULL, *value;
    const char *key;
    if (status == 0 && yaml.root && !keys) status = -1;
    if (status == 0 && keys && !json_is_object(keys))
        status = mt_error_set(file->error, "%s: expects keys and values", file->path);
    json_object_foreach(keys, key, value) if (status == 0) status = mt_kd_key(file, key, value);
    if (status == 0) status = mt_kd_balance(file, keys);
    json_decref(keys);
    mt_yaml_close(&yaml);
    return status;
}

int mt_options_read_distillation(mt_run_options *o, mt_error *error) {
    mt_kd_file file = {o, o->export_kd_cfg, error};
    bool named = o->export_kd_teacher_load != NULL;
    if (!named && !file.path) return 0;
    if (named && (o->teacher_load || (mt_options_gave(o, MT_AT(stack.stage)) && o->stack.stage != MT_STAGE_KD)))
        return mt_error_set(error,
                            "--export-kd-teacher-load means --stage kd --teacher-load; leave one of the two out");
    if (!named && !o->teacher_load)
        return mt_error_set(error, "--export-kd-cfg needs --export-kd-teacher-load, or --stage kd and --teacher-load");
    if (named && mt_options_set(o, "teacher-load", o->export_kd_teacher_load, error) != 0) return -1;
    if (named && mt_options_set(o, "stage", "kd", error) != 0) return -1;
    if (named && !o->sft && !mt_options_gave(o, MT_AT(kd_data)) &&
        mt_options_set(o, "kd-data", "pretraining", error) != 0)
        return -1;
    if (named) mt_string_set(&o->export_kd_teacher_load, NULL);
    bool is_absent = !file.path || (o->print_config && access(file.path, F_OK) != 0);
    if (is_absent) return mt_options_gave(o, MT_AT(kd_balance)) ? 0 : mt_options_set(o, "kd-balance", "hidden", error);
    int status = mt_kd_file_read(&file);
    if (status == 0) mt_string_set(&o->export_kd_cfg, NULL);
    return status;
}
