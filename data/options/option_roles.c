/* option_roles.c: options in a file with roles, and what gives way to the command line. */
#include "option_roles.h"

#include "../base/file.h"
#include "option_rules.h"
#include "role_config.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Notes a key for --print-config: the option that it sets, or "", and why it has no effect, or "". */
static void mt_options_note_key(mt_run_options *options, const mt_role_entry *entry, const char *option,
                                const char *text) {
    char line[24];
    mt_strings *keys = &options->config_keys;
    if (entry->line == MT_YAML_COMMAND_LINE)
        snprintf(line, sizeof line, "-"); // of the command line
    else
        snprintf(line, sizeof line, "%lld", entry->line);
    for (int64_t i = 0; i < keys->count && *option; i += 4)
        if (strcmp(keys->items[i + 2], option) == 0 && !*keys->items[i + 3]) {
            char replaced[200];
            snprintf(replaced, sizeof replaced, "line %s, %.100s, has this option too", line, entry->name);
            mt_string_set(&keys->items[i + 3], replaced);
        }
    mt_strings_add(keys, line);
    mt_strings_add(keys, entry->key);
    mt_strings_add(keys, option);
    mt_strings_add(keys, text);
}

/* Records a key that was refused. `nearest` is the key or the option with the nearest name, or "". */
static void mt_option_reader_refuse_key(mt_option_reader *reader, const char *position, const char *name,
                                        const char *reason, const char *nearest) {
    mt_refusal *refusal = mt_option_reader_add_refusal(reader);
    if (!refusal) return;
    snprintf(refusal->position, sizeof refusal->position, "%s", position);
    snprintf(refusal->name, sizeof refusal->name, "%.100s", name);
    snprintf(refusal->reason, sizeof refusal->reason, "%s", reason);
    snprintf(refusal->nearest, sizeof refusal->nearest, "%s", nearest);
}

/* A key for an option that the table does not have. */
static void mt_option_reader_take_absent(mt_option_reader *reader, const mt_role_entry *entry, const char *position) {
    char reason[300];
    const char *value = entry->values.count > 0 ? entry->values.items[0] : "";
    bool is_on = true, is_stage = strcmp(entry->option, "stage") == 0;
    if (entry->is_implied && (!is_stage || reader->program == MT_PROGRAM_INFER)) return;
    bool is_off =
        (mt_parse_bool(value, &is_on) && !is_on) || (entry->accepted && mt_choice_index(entry->accepted, value) >= 0);
    snprintf(reason, sizeof reason, "sets --%s%s%s, which is not built yet", entry->option, is_stage ? " " : "",
             is_stage ? value : "");
    if (is_off)
        mt_options_note_key(reader->options, entry, "", "so here in any case");
    else
        mt_option_reader_refuse_key(reader, position, entry->name, reason, "");
}

/* A key that has Megatron-LM's name of no option. */
static void mt_option_reader_take_other(mt_option_reader *reader, const mt_role_entry *entry, const char *position,
                                        const mt_setting *setting) {
    const char *value = entry->values.count > 0 ? entry->values.items[0] : NULL;
    mt_name_kind kind = setting->megatron.kind;
    if (kind == MT_NAME_NO_MEANING || kind == MT_NAME_IDLE) {
        mt_options_note_key(reader->options, entry, "", setting->megatron.text);
        return;
    }
    if (kind != MT_NAME_UNKNOWN && entry->values.count == 0) return; // null
    int64_t before = reader->num_refused, uncollected = reader->num_uncollected;
    mt_option_reader_refuse(reader, setting, position, entry->name, strlen(entry->name), value);
    if (reader->num_uncollected > uncollected) return;
    if (reader->num_refused == before)
        mt_options_note_key(reader->options, entry, "", "off, as here in any case");
    else if (kind == MT_NAME_UNKNOWN && *entry->text)
        snprintf(reader->refused[before].nearest, sizeof reader->refused[before].nearest, "%s", entry->text);
}

/* A whole number that a file of roles writes as a float, "3.0", without its fraction in `whole`; else the text. */
static const char *mt_whole_number(const mt_option *row, const char *text, char whole[32]) {
    char *end;
    double value = strtod(text, &end);
    bool is_float = row && row->type == MT_INT && *text && strspn(text, "0123456789+-.eE") == strlen(text) && *end == 0;
    if (!is_float || value != floor(value) || fabs(value) >= 0x1p53) return text;
    snprintf(whole, 32, "%.0f", value);
    return whole;
}

/* Adds the setting of a key. */
static void mt_givens_add_entry(mt_givens *givens, mt_option_reader *reader, const mt_role_entry *entry,
                                const char *position, const mt_setting *setting) {
    const mt_option *row = setting->row;
    const mt_strings *values = &entry->values;
    bool is_on = true, is_flag = !row && strcmp(setting->megatron.value, "true") == 0;
    if (is_flag && values->count == 1 && mt_parse_bool(values->items[0], &is_on) && !is_on) {
        mt_options_note_key(reader->options, entry, "", setting->megatron.text);
        return;
    }
    if (row) mt_options_note_key(reader->options, entry, mt_option_of(row->offset)->name, "");
    char where[480], whole[32];
    if (entry->is_implied) // messages name the option
        snprintf(where, sizeof where, "--%.80s", entry->option);
    else if (entry->is_derived && row) // whose value the file does not hold
        snprintf(where, sizeof where, "--%.60s (by %.80s)", mt_option_of(row->offset)->name, entry->name);
    else
        snprintf(where, sizeof where, "%s%.80s", position, entry->name);
    mt_given *given = mt_givens_add(givens, MT_SOURCE_ROLE, entry->is_sequence ? MT_GIVEN_LIST : MT_GIVEN_TEXT,
                                    position, entry->option);
    given->line = entry->line;
    mt_string_set(&given->where, where);
    for (int64_t i = 0; i < values->count; i++)
        mt_strings_add(&given->values, mt_whole_number(row, values->items[i], whole));
}

/* True if the command line has an option: then a value of the file that is refused does no harm. */
static bool mt_givens_have_option(const mt_givens *givens, const char *name) {
    mt_setting setting = {0};
    if (name) setting = mt_setting_find(name, strlen(name));
    return setting.row && mt_givens_find(givens, setting.row->offset);
}

/* Adds the setting of an entry, or notes or refuses it. */
static void mt_option_reader_take_entry(mt_option_reader *reader, mt_givens *givens, const mt_role_entry *entry,
                                        const char *path) {
    char position[300];
    bool infers = reader->program == MT_PROGRAM_INFER;
    if (entry->line == MT_YAML_COMMAND_LINE)
        snprintf(position, sizeof position, "command line: ");
    else
        snprintf(position, sizeof position, "%.250s:%lld: ", path, entry->line);
    if (entry->kind == MT_ENTRY_UNKNOWN)
        mt_option_reader_refuse_key(reader, position, entry->name, "", entry->text);
    else if (entry->kind == MT_ENTRY_REFUSED && mt_givens_have_option(givens, entry->option))
        mt_options_note_key(reader->options, entry, "", "gives way to the command line");
    else if (entry->kind == MT_ENTRY_REFUSED)
        mt_option_reader_refuse_key(reader, position, entry->name, entry->text, "");
    else if (entry->kind != MT_ENTRY_OPTION)
        mt_options_note_key(reader->options, entry, "", entry->text);
    if (entry->kind != MT_ENTRY_OPTION) return;
    mt_setting setting = mt_setting_find(entry->option, strlen(entry->option));
    bool is_stage = setting.row && setting.row->offset == MT_AT(stack.stage);
    if (entry->is_name) {
        bool is_unknown = !setting.row && setting.megatron.kind == MT_NAME_UNKNOWN;
        if (is_unknown) mt_option_reader_take_other(reader, entry, position, &setting);
    } else if (is_stage && !infers && mt_choice_index(setting.row->values, entry->values.items[0]) < 0) {
        mt_option_reader_take_absent(reader, entry, position);
    } else if (mt_setting_is_accepted(&setting, reader->program)) {
        if (entry->values.count > 0 || entry->is_sequence) // otherwise null
            mt_givens_add_entry(givens, reader, entry, position, &setting);
    } else if (setting.row && !entry->is_implied) {
        mt_options_note_key(reader->options, entry, "", infers ? "training (train)" : "generation (infer)");
    } else if (!setting.row && entry->is_megatron) {
        mt_option_reader_take_other(reader, entry, position, &setting);
    } else if (!setting.row) {
        mt_option_reader_take_absent(reader, entry, position);
    }
}

int mt_givens_add_role(mt_givens *givens, const char *role, mt_yaml *yaml, mt_option_reader *reader) {
    mt_role_config config;
    int status = mt_role_config_read(&config, role, yaml);
    for (int64_t i = 0; i < config.count && status == 0; i++)
        mt_option_reader_take_entry(reader, givens, &config.entries[i], yaml->path);
    reader->options->config_devices = config.num_devices;
    reader->role_rests = !config.trains;
    mt_role_config_free(&config);
    return status;
}

bool mt_option_is_typed(const mt_option_reader *reader, size_t offset) {
    return reader->typed[offset / 64] >> offset % 64 & 1;
}

/* True if a rule of `column` names an option of the command line, which breaks it. `row` has the column. */
static bool mt_option_rule_yields(const mt_option_reader *reader, const mt_option *row, bool needs,
                                  mt_option_rule *rule) {
    const mt_run_options *o = reader->options;
    for (const char *column = needs ? row->needs : row->excludes; mt_option_next_rule(&column, rule);) {
        if (!mt_option_is_typed(reader, rule->other->offset) || !mt_option_rule_holds(o, row, rule)) continue;
        bool has = mt_option_has(o, rule->other, rule->choices);
        if (needs ? !has : !rule->condition && !rule->choices && mt_option_used(o, rule->other)) return true;
    }
    return false;
}

/* True if an option of the file is for something else than this run: another stage, conversations, scores, a critic,
 * another policy loss. Dual clipping is for several losses, and is not passed over. */
static bool mt_option_lacks_purpose(const mt_option_reader *reader, const mt_option *row) {
    static const char purposes[] = "sft|chat|score|serve|stage|reward|adv-estimator|kl-in-reward|kd-objective|"
                                   "dynamic-sampling|recompute-granularity|lora-rank|optimizer-cpu-offload|"
                                   "pg-variant|rollout-is|rollout-rs";
    const mt_run_options *o = reader->options;
    mt_option_rule rule;
    if (mt_options_idle_in_rl(o, row->offset)) return true;
    bool of_saving = row->offset == MT_AT(save_interval) || row->offset == MT_AT(save_interval_fraction);
    if (!o->save && (of_saving || row->offset == MT_AT(keep_checkpoints))) return true;
    bool of_chat = row->offset == MT_AT(chat_template) || row->offset == MT_AT(chat_template_kwargs);
    if (reader->program == MT_PROGRAM_INFER && of_chat && !o->chat && !o->score && !o->prompts && !o->serve &&
        o->image.count == 0)
        return true;
    if (reader->program == MT_PROGRAM_INFER && row->offset == MT_AT(num_return_sequences) && o->prompt.count == 0 &&
        !o->prompts && !o->prompt_tokens)
        return true;
    for (const char *column = row->needs; mt_option_next_rule(&column, &rule);) {
        bool listed = mt_choice_index(purposes, rule.other->name) >= 0 && row->offset != MT_AT(clip_ratio_c);
        bool samples = rule.other->offset == MT_AT(sft) && o->stack.stage != MT_STAGE_PT;
        if (listed && !samples && rule.other->programs & (int)reader->program && mt_option_rule_holds(o, row, &rule) &&
            !mt_option_has(o, rule.other, rule.choices))
            return true;
    }
    const mt_option *stage = mt_option_of(MT_AT(stack.stage));
    for (const char *column = stage->excludes; mt_option_next_rule(&column, &rule);)
        if (rule.other->offset == row->offset && mt_option_rule_holds(o, stage, &rule)) return true;
    return false;
}

/* True for a size of --rollout-*, --teacher-*, --ref-*, --critic-* or --reward-*. */
static bool mt_option_is_of_another_role(const mt_option *row) {
    static const char *const roles[] = {"rollout-", "teacher-", "ref-", "critic-", "reward-"};
    bool is_of_role = false;
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        is_of_role |= strncmp(row->name, roles[i], strlen(roles[i])) == 0;
    return is_of_role && mt_text_ends_with(row->name, "-model-parallel-size");
}

/* The option of the command line with which an option of the file breaks a rule; NULL: none. */
static const char *mt_option_broken_by(const mt_option_reader *reader, const mt_option *row) {
    const mt_run_options *o = reader->options;
    mt_option_rule rule;
    for (const mt_option *same = mt_option_table; same->help; same++) {
        if (!same->name || same->offset != row->offset) continue;
        if (mt_option_rule_yields(reader, same, false, &rule)) return rule.other->name;
        if (mt_option_rule_yields(reader, same, true, &rule)) return rule.other->name;
    }
    for (const mt_option *other = mt_option_table; other->help; other++) {
        if (!other->name || !mt_option_is_typed(reader, other->offset)) continue;
        for (const char *column = other->excludes; mt_option_next_rule(&column, &rule);)
            if (rule.other->offset == row->offset && !rule.condition && !rule.choices && mt_option_used(o, other))
                return other->name;
    }
    return NULL;
}

/* The option of the command line that an option of the file gives way to; NULL: none. */
static const char *mt_option_yields_to(const mt_option_reader *reader, const mt_option *row) {
    const mt_run_options *o = reader->options;
    bool shaped =
        mt_option_is_typed(reader, MT_AT(stack.num_layers)) && mt_option_is_typed(reader, MT_AT(stack.hidden_size));
    bool loads = row->offset == MT_AT(load) || row->offset == MT_AT(finetune);
    if (loads && mt_option_is_typed(reader, MT_AT(hf_config))) return "hf-config";
    bool partner = row->offset == MT_AT(critic_load) || row->offset == MT_AT(ref_load); // of the actor's shape
    if ((loads || partner) && shaped) return "num-layers and --hidden-size";
    if (loads && mt_option_is_typed(reader, MT_AT(load))) return "load, which resumes a run unless --finetune is given";
    if (row->offset == MT_AT(train_epochs) && o->stack.train_iters > 0) return "train-iters";
    if (row->offset == MT_AT(stack.sequence_parallel) && o->stack.tensor_model_parallel_size == 1)
        return "tensor-model-parallel-size 1";
    bool other_role = mt_option_is_of_another_role(row); // the file's layouts are for its own number of ranks
    if (other_role && mt_option_is_typed(reader, MT_AT(stack.tensor_model_parallel_size)))
        return "tensor-model-parallel-size";
    if (other_role && mt_option_is_typed(reader, MT_AT(stack.pipeline_model_parallel_size)))
        return "pipeline-model-parallel-size";
    return mt_option_broken_by(reader, row);
}

/* Marks the keys of an option as without effect. */
static void mt_options_yield_keys(mt_run_options *options, const mt_option *row, const char *text) {
    const char *name = mt_option_of(row->offset)->name;
    for (int64_t i = 0; i < options->config_keys.count; i += 4)
        if (strcmp(options->config_keys.items[i + 2], name) == 0 && !*options->config_keys.items[i + 3])
            mt_string_set(&options->config_keys.items[i + 3], text);
}

void mt_option_reader_yield_ratios(mt_option_reader *reader) {
    static const size_t ratios[] = {MT_AT(clip_ratio_low), MT_AT(clip_ratio_high), MT_AT(clip_ratio)};
    bool has_side = mt_option_is_typed(reader, ratios[0]) || mt_option_is_typed(reader, ratios[1]);
    for (int i = 0; i < 3; i++) {
        const mt_option *row = mt_option_of(ratios[i]);
        bool is_idle = i == 2 && has_side && mt_options_idle_in_rl(reader->options, ratios[2]);
        if (mt_option_is_typed(reader, ratios[i]) || (!is_idle && !mt_option_is_typed(reader, ratios[2]))) continue;
        mt_options_yield_keys(reader->options, row, "gives way to the command line's ratios");
        mt_option_reset(reader->options, row);
    }
}

void mt_option_reader_yield(mt_option_reader *reader, int64_t file_iters) {
    mt_run_options *o = reader->options;
    char text[200];
    if (mt_option_is_typed(reader, MT_AT(stack.train_iters)) && file_iters > 0 && !MT_GIVEN(o, stack.lr_decay_iters))
        o->stack.lr_decay_iters = file_iters;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || !mt_option_is_typed(reader, row->offset)) continue;
        mt_options_yield_keys(o, row, "the command line has their options");
    }
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || mt_option_is_typed(reader, row->offset) || !mt_options_gave(o, row->offset)) continue;
        bool lacks = mt_option_lacks_purpose(reader, row);
        const char *other = lacks ? "" : mt_option_yields_to(reader, row);
        if (!other) continue;
        snprintf(text, sizeof text, lacks ? "of no use in this run" : "gives way to --%s", other);
        mt_options_yield_keys(o, row, text);
        mt_option_reset(o, row);
        reader->typed[row->offset / 64] |= (uint64_t)1 << row->offset % 64; // options that need it give way as well
        row = mt_option_table;
    }
}

/* Notes an option of a file that gives way. */
static void mt_option_reader_note_yield(mt_option_reader *reader, const mt_option *row, const char *other) {
    char where[400], reason[200], *origin = mt_option_origin_text(reader->options, row);
    snprintf(where, sizeof where, "--%.60s (%.300s)", row->name, origin ? origin : "");
    free(origin);
    snprintf(reason, sizeof reason, "gives way to --%.150s of the command line", other);
    mt_strings_add(&reader->idle, where), mt_strings_add(&reader->idle, reason);
}

void mt_option_reader_yield_file(mt_option_reader *reader) {
    mt_run_options *o = reader->options;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || mt_option_is_typed(reader, row->offset) || !mt_options_gave(o, row->offset)) continue;
        const char *other = mt_option_broken_by(reader, row);
        if (!other) continue;
        mt_option_reader_note_yield(reader, row, other);
        mt_option_reset(o, row);
        reader->typed[row->offset / 64] |= (uint64_t)1 << row->offset % 64; // options that need it give way as well
        row = mt_option_table;
    }
}

void mt_options_yield_experts(mt_run_options *options) {
    const mt_strings *keys = &options->config_keys;
    mt_option_rule rule;
    if (!options->role || options->stack.num_experts > 0) return;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        bool needs = false, is_from_file = false;
        if (!row->name || !mt_options_gave(options, row->offset)) continue;
        for (const char *column = row->needs; mt_option_next_rule(&column, &rule);)
            needs |= rule.other->offset == MT_AT(stack.num_experts);
        const char *name = mt_option_of(row->offset)->name;
        for (int64_t i = 0; i < keys->count; i += 4)
            is_from_file |= strcmp(keys->items[i + 2], name) == 0 && !*keys->items[i + 3];
        if (!needs || !is_from_file) continue;
        mt_options_yield_keys(options, row, "the model has no experts");
        mt_option_reset(options, row);
    }
}
