/* role_config.c: reads a YAML file with roles. A walk over the keys of the pipeline and of one role looks each up in
 * role_keys.c. */
#include "role_config.h"

#include "../base/file.h"
#include "megatron_names.h"
#include "option_table.h"
#include "role_keys.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static void free_entry(mt_role_entry *entry) {
    free(entry->key);
    free(entry->option);
    free(entry->text);
    free(entry->accepted);
    mt_strings_free(&entry->values);
}

void mt_role_config_free(mt_role_config *config) {
    for (int64_t i = 0; i < config->count; i++) free_entry(&config->entries[i]);
    free(config->entries);
    *config = (mt_role_config){0};
}

enum {
    MAX_KEY = 400,       // bytes of a key with its sections
    MAX_SEARCHED = 2000, // names of Megatron-LM's options whose nearest keys are looked up
    MAX_UNKNOWN = 50,    // keys whose nearest names are looked up
    MAX_FILE = 1 << 20,  // bytes of a file that a key names
    VERL_LENGTH = 512,   // of prompts and of responses, by default
    VERL_BATCH = 1024,   // prompts of an iteration, by default
    ROLL_PROMPT = 1024
};

static const double VERL_LR = 1e-6;          // of an actor, by default, also in Trinity-RFT
static const double TRINITY_LR_SHARE = 0.01; // the least learning rate, by default

typedef struct reader {
    mt_yaml *yaml;
    mt_role_config *config;
    const char *role;
    const char *stage; // of the role; NULL: it does not train
    bool has_role;
    char key[MAX_KEY]; // of the value at hand, with its sections
    int depth;         // of sections; 1: the keys of the file
    int64_t num_unknown, num_searched;
    bool is_other; // the keys at hand are another role's, and only their names matter
    bool distills; // ROLL's on-policy distillation
} reader;

/* The text of a key of the section that the value at hand is in, or of the root, to free; NULL: there is none. */
static char *sibling_text(reader *r, const mt_yaml_node *section, const char *name) {
    mt_error *error = r->yaml->error, ignored;
    mt_yaml_node *node = mt_yaml_get(section, name);
    if (!node) return NULL;
    r->yaml->error = &ignored;
    char *text = NULL;
    if (mt_yaml_follow(r->yaml, &node) == 0 && node->kind == MT_YAML_TEXT && !mt_yaml_is_null(node))
        text = mt_yaml_value(r->yaml, node, true);
    r->yaml->error = error;
    return text;
}

/* ---- entries ---------------------------------------------------------------------------------------------------- */

static mt_role_entry *add_entry(reader *r, mt_role_entry_kind kind, long long line, const char *text) {
    mt_role_config *c = r->config;
    c->entries = mt_realloc(c->entries, (c->count + 1) * (int64_t)sizeof *c->entries);
    mt_role_entry *entry = &c->entries[c->count++];
    *entry = (mt_role_entry){.kind = kind, .key = mt_strdup(r->key), .text = mt_strdup(text), .line = line};
    const char *dot = strrchr(entry->key, '.');
    entry->name = dot ? dot + 1 : entry->key;
    return entry;
}

static mt_role_entry *add_option(reader *r, long long line, const char *option, const char *value) {
    mt_role_entry *entry = add_entry(r, MT_ENTRY_OPTION, line, "");
    entry->option = mt_strdup(option);
    if (value) mt_strings_add(&entry->values, value);
    return entry;
}

/* Adds the text of a scalar, with a name of its own here, to the values of an entry. */
static void add_value(reader *r, int64_t index, const mt_role_key *row, const char *text) {
    char *value = mt_malloc(MT_YAML_BYTES), reason[400];
    bool good = !row || mt_role_key_translate(row, text, value, MT_YAML_BYTES);
    mt_role_entry *entry = &r->config->entries[index];
    if (good && row && strncmp(value, "--", 2) == 0) {
        mt_string_set(&entry->option, value + 2);
        mt_strings_add(&entry->values, "true");
    } else if (good) {
        mt_strings_add(&entry->values, row ? value : text);
    } else {
        snprintf(reason, sizeof reason, "cannot be %.100s: %.250s", text, value);
        entry->kind = MT_ENTRY_REFUSED;
        mt_string_set(&entry->text, reason);
    }
    free(value);
}

static int expects_value(const reader *r, const mt_yaml_node *node, long long line) {
    return mt_error_set(r->yaml->error, "%s%s expects a value, not a %s", mt_yaml_place_of(r->yaml, line).text, r->key,
                        node->kind == MT_YAML_SECTION ? "section" : "list in a list");
}

/* Adds an entry for an option with the values of a node: one, or a list. */
static int take_values(reader *r, const mt_role_key *row, const char *option, mt_yaml_node *node, long long line) {
    int64_t index = r->config->count;
    mt_role_entry *entry = add_option(r, line, option, NULL);
    entry->is_megatron = !row;
    entry->is_sequence = node->kind == MT_YAML_LIST;
    if (row && row->accepted) entry->accepted = mt_strdup(row->accepted);
    if (node->kind == MT_YAML_SECTION) return expects_value(r, node, line);
    bool is_list = entry->is_sequence;
    for (int64_t i = 0; !is_list || i < node->count; i++) {
        mt_yaml_node *scalar = is_list ? node->values[i] : node;
        if (mt_yaml_visit(r->yaml, scalar) != 0 || mt_yaml_follow(r->yaml, &scalar) != 0) return -1;
        if (scalar->kind != MT_YAML_TEXT) return expects_value(r, scalar, line);
        char *text = mt_yaml_value(r->yaml, scalar, true);
        if (!text) return -1;
        add_value(r, index, row, text);
        free(text);
        if (!is_list) return 0;
    }
    return 0;
}

/* ---- values that follow from several keys ----------------------------------------------------------------------- */

/* Reads up to three numbers from 0 to a million with commas between them; returns how many, or -1. */
static int read_numbers(const char **text, int64_t numbers[3]) {
    for (int count = 0; count < 3;) {
        char *end;
        numbers[count] = strtoll(*text, &end, 10);
        if (end == *text || numbers[count] < 0 || numbers[count] > 1000000) return -1;
        count++;
        *text = end + strspn(end, " ");
        if (**text != ',') return count;
        ++*text;
    }
    return -1;
}

/* The number of items of Python's list(range(a, b, c)) or [0, 1], also several with + between them; -1: neither. */
static int64_t count_devices(const char *text) {
    int64_t count = 0;
    for (;;) {
        text += strspn(text, " ");
        if (strncmp(text, "list(range(", 11) == 0) {
            int64_t range[3] = {0, 0, 1};
            text += 11;
            int read = read_numbers(&text, range);
            if (read == 1) range[1] = range[0], range[0] = 0;
            if (read < 1 || range[2] < 1 || strncmp(text, "))", 2) != 0) return -1;
            if (range[1] > range[0]) count += (range[1] - range[0] + range[2] - 1) / range[2];
            text += 2;
        } else if (*text == '[') {
            do {
                char *end;
                (void)strtoll(++text, &end, 10);
                if (end == text) return -1;
                count++;
                text = end + strspn(end, " ");
            } while (*text == ',');
            if (*text++ != ']') return -1;
        } else {
            return -1;
        }
        text += strspn(text, " ");
        if (!*text) return count;
        if (*text++ != '+') return -1;
    }
}

/* The number of items of a list of whole numbers; -1: it has others. */
static int64_t count_items(reader *r, const mt_yaml_node *list) {
    int64_t count = list->count;
    for (int64_t i = 0; i < list->count && count >= 0; i++) {
        char *text = mt_yaml_expand(r->yaml, list->values[i]);
        if (!text || !*text || text[strspn(text, "0123456789")]) count = -1;
        free(text);
    }
    return count;
}

static int take_devices(reader *r, mt_yaml_node *node, long long line) {
    char text[80];
    int64_t count = -1;
    if (node->kind == MT_YAML_LIST) {
        count = count_items(r, node);
    } else if (node->kind == MT_YAML_TEXT) {
        char *expanded = mt_yaml_expand(r->yaml, node);
        if (!expanded) return -1;
        count = count_devices(expanded);
        free(expanded);
    }
    if (count < 0)
        return mt_error_set(r->yaml->error, "%s%s expects devices, such as list(range(0,8)) or [0, 1]",
                            mt_yaml_place_of(r->yaml, line).text, r->key);
    r->config->num_devices = count;
    snprintf(text, sizeof text, "the ranks are those of mpirun; the file has %lld", (long long)count);
    add_entry(r, MT_ENTRY_UNUSED, line, text);
    return 0;
}

static bool file_exists(const char *path) {
    return mt_path_exists(path, (int64_t)strlen(path), "");
}

/* Replaces "~/" by the home folder. */
static void expand_home(mt_role_entry *entry) {
    const char *home = getenv("HOME");
    for (int64_t i = 0; home && i < entry->values.count; i++) {
        if (strncmp(entry->values.items[i], "~/", 2) != 0) continue;
        char *joined = mt_path_join(home, entry->values.items[i] + 2);
        mt_string_set(&entry->values.items[i], joined);
        free(joined);
    }
}

/* Files are looked up as they are named, then in dataset_dir. Reinforcement learning has prompts, and no validation. */
static void find_files(reader *r, const mt_yaml_node *mapping, mt_role_entry *entry) {
    char *folder = sibling_text(r, mapping, "dataset_dir");
    bool is_valid = strcmp(entry->option, "valid-data-path") == 0, is_rl = r->stage && strcmp(r->stage, "rl") == 0;
    if (is_rl) mt_string_set(&entry->option, "data-path");
    if (is_rl && is_valid) entry->kind = MT_ENTRY_UNUSED, mt_string_set(&entry->text, "a validation of responses");
    for (int64_t i = 0; folder && i < entry->values.count; i++) {
        char *joined = mt_path_join(folder, entry->values.items[i]);
        if (!file_exists(entry->values.items[i]) && file_exists(joined)) mt_string_set(&entry->values.items[i], joined);
        free(joined);
    }
    free(folder);
}

/* The number that a key of a section has; `fallback` if there is none. */
static double sibling_number(reader *r, const mt_yaml_node *mapping, const char *name, double fallback) {
    char *text = sibling_text(r, mapping, name), *end;
    double value = text ? strtod(text, &end) : fallback;
    if (text && (end == text || *end)) value = fallback;
    free(text);
    return value;
}

/* The text of a path from the root, as a number. */
static double path_number(reader *r, const char *path, double fallback) {
    mt_error *error = r->yaml->error, ignored;
    mt_yaml_node *node;
    double value = fallback;
    r->yaml->error = &ignored;
    if (mt_yaml_find_path(r->yaml, path, r->yaml->root, &node) == 0 && mt_yaml_follow(r->yaml, &node) == 0) {
        char *text = mt_yaml_value(r->yaml, node, true);
        if (text && *text && strspn(text, "0123456789.eE+-") == strlen(text)) value = strtod(text, NULL);
        free(text);
    }
    r->yaml->error = error;
    return value;
}

/* Replaces the value of the entry by a number. */
static void set_number(mt_role_entry *entry, double value) {
    char text[32];
    mt_real_print(text, value);
    if (strtod(entry->values.items[0], NULL) != value) entry->is_derived = true;
    mt_string_set(&entry->values.items[0], text);
}

static bool is_number(const char *text, double *value) {
    char *end;
    *value = strtod(text, &end);
    return end > text && *end == 0 && *value > -1e15 && *value < 1e15;
}

#define TRINITY_STAGES "sft|dpo" // algorithms that learn from files

/* Trinity-RFT's algorithm_type: the entry has the estimator of advantages, unless advantage_fn has one. Adds its policy
 * loss, unless policy_loss_fn has one, and that there is no divergence or no division by the deviation. */
static void derive_algorithm(reader *r, const mt_yaml_node *mapping, mt_role_entry *entry) {
    char *type = sibling_text(r, mapping, "algorithm_type"), *loss;
    if (!type) return; // a list, which the option refuses
    loss = sibling_text(r, mapping, "policy_loss_fn");
    bool has_loss = mt_choice_index("gspo|cispo|sapo|topr|opmd|sppo|" TRINITY_STAGES, type) >= 0;
    char *advantage = sibling_text(r, mapping, "advantage_fn");
    // and does not divide by the deviation
    bool subtracts_mean = advantage ? strcmp(advantage, "opmd") == 0 : mt_choice_index("opmd|sppo", type) >= 0;
    const char *own = has_loss ? type : "ppo";
    long long line = entry->line;
    bool is_stage = mt_choice_index(TRINITY_STAGES, own) >= 0;
    if (loss && strcmp(loss, own) != 0 && (is_stage || mt_choice_index(TRINITY_STAGES, loss) >= 0)) {
        char reason[200];
        snprintf(reason, sizeof reason, "has the loss %s, and policy_loss_fn is %.80s; leave that out", own, loss);
        entry->kind = MT_ENTRY_REFUSED;
        mt_string_set(&entry->text, reason);
    } else if (is_stage) {
        entry->kind = MT_ENTRY_FIXED;
        mt_string_set(&entry->text, "the stage of training");
    } else if (strcmp(loss ? loss : own, "topr") == 0 && strcmp(advantage                   ? advantage
                                                                : strcmp(type, "topr") == 0 ? "reinforce"
                                                                                            : type,
                                                                "reinforce") != 0) {
        entry->kind = MT_ENTRY_REFUSED;
        mt_string_set(&entry->text, "with policy_loss_fn topr needs advantage_fn reinforce, whose advantages are the "
                                    "scores: --pg-variant topr distinguishes these");
    } else {
        char *kl = sibling_text(r, mapping, "kl_loss_fn");
        bool has_divergence = kl ? strcmp(kl, "none") != 0 : mt_choice_index("dapo|sppo", type) < 0;
        const char *variant = strcmp(own, "sapo") == 0 ? "sapo_detached" : own;
        if (has_loss && !loss) add_option(r, line, "pg-variant", variant)->is_implied = true;
        if (!has_divergence) add_option(r, line, "kl-loss-coef", "0")->is_implied = true;
        if (subtracts_mean) add_option(r, line, "norm-adv-by-std", "false")->is_implied = true;
        free(kl);
        if (advantage && entry->kind == MT_ENTRY_OPTION) {
            entry->kind = MT_ENTRY_FIXED;
            mt_string_set(&entry->text, "advantage_fn chooses the advantages");
        }
    }
    free(type), free(loss), free(advantage);
}

/* Makes an entry one without effect, or one that is refused. */
static void set_kind(mt_role_entry *entry, mt_role_entry_kind kind, const char *text) {
    entry->kind = kind;
    mt_string_set(&entry->text, text);
}

/* The number of responses in a group of ROLL's environments; 0: the file has no environments. */
static double responses_of_group(reader *r) {
    if (!mt_yaml_get(r->yaml->root, "train_env_manager")) return 0;
    return fmax(path_number(r, "train_env_manager.group_size", 1), 1);
}

/* Keys of ROLL's files with environments: rollout_batch_size counts responses, and estimators without a critic sum
 * rewards that reward_normalization has compared. */
static void derive_of_environments(reader *r, const mt_role_key *row, const mt_yaml_node *mapping, double number,
                                   mt_role_entry *entry) {
    double each = responses_of_group(r);
    char *value = mt_strdup(entry->values.items[0]);
    if (row->kind == MT_KEY_TRAJECTORIES && each > 1) {
        if (fmod(number, each) == 0)
            set_number(entry, number / each);
        else
            set_kind(entry, MT_ENTRY_REFUSED, "counts responses: must be a multiple of train_env_manager.group_size");
    } else if (row->kind == MT_KEY_ESTIMATOR && each > 0) {
        if (mt_choice_index("grpo|reinforce", value) >= 0) {
            mt_string_set(&entry->values.items[0], "step_reinforce");
            entry->is_derived = true;
        }
    } else if (row->kind == MT_KEY_GROUPING) {
        char *method = sibling_text(r, mapping, "method");
        bool has_types = mt_yaml_get(mapping, "norm_mean_type") || mt_yaml_get(mapping, "norm_std_type");
        bool is_known = mt_choice_index("traj_group_id|state|batch", value) >= 0;
        bool is_off = !has_types && (!method || strcmp(method, "identity") == 0);
        set_kind(entry, is_known || is_off ? MT_ENTRY_UNUSED : MT_ENTRY_REFUSED,
                 is_off     ? "rewards are not normalized"
                 : is_known ? "method and the types of mean and deviation"
                            : "rewards are compared with those of their prompt or of the iteration: take traj_group_id "
                              "or batch");
        free(method);
    } else if (row->kind == MT_KEY_NORM_METHOD) {
        char *grouping = sibling_text(r, mapping, "grouping");
        const char *level = grouping && strcmp(grouping, "batch") == 0 ? "batch" : "group";
        if (mt_yaml_get(mapping, "norm_mean_type") || mt_yaml_get(mapping, "norm_std_type")) {
            set_kind(entry, MT_ENTRY_UNUSED, "norm_mean_type and norm_std_type are given");
        } else if (entry->kind == MT_ENTRY_OPTION && strcmp(value, "none") != 0) {
            mt_string_set(&entry->values.items[0], level);
            entry->is_derived = true;
            if (strcmp(value, "mean_std") == 0) add_option(r, entry->line, "norm-std-type", level)->is_implied = true;
        }
        free(grouping);
    }
    free(value);
}

/* Trinity-RFT's kl_penalty_fn, or its weight, with an algorithm_type and the estimator of the divergence in the loss
 * (NULL: none). Its trainer subtracts the divergence where it computes the advantages. */
static void derive_penalty(reader *r, mt_role_entry *entry, const char *type, const char *of_loss) {
    char *penalty = sibling_text(r, mt_yaml_get(r->yaml->root, "algorithm"), "kl_penalty_fn");
    bool penalizes = penalty && strcmp(penalty, "none") != 0;
    bool is_weight = strcmp(entry->name, "kl_coef") == 0, same = of_loss && penalty && strcmp(of_loss, penalty) == 0;
    if (!penalizes) {
        set_kind(entry, is_weight ? MT_ENTRY_UNUSED : MT_ENTRY_FIXED,
                 is_weight ? "kl_penalty_fn, which is none" : "rewards have no divergence");
    } else if (mt_choice_index("ppo|rloo|reinforceplusplus", type) < 0) {
        set_kind(entry, MT_ENTRY_UNUSED, "the advantages of ppo, rloo and reinforceplusplus");
    } else if (!is_weight && of_loss && !same) {
        set_kind(entry, MT_ENTRY_REFUSED,
                 "differs from kl_loss_fn, which is k2 by default; one --kl-loss-type serves both");
    } else if (!is_weight) {
        if (!of_loss) add_option(r, entry->line, "kl-loss-type", entry->values.items[0])->is_implied = true;
        mt_string_set(&entry->values.items[0], "true");
    }
    free(penalty);
}

/* The losses of a file of Trinity-RFT: whether those of its algorithm_type have a divergence or an entropy, and one
 * aggregation for all. */
static void derive_loss(reader *r, const mt_role_key *row, double number, mt_role_entry *entry) {
    const mt_yaml_node *algorithm = mt_yaml_get(r->yaml->root, "algorithm");
    char *type = sibling_text(r, algorithm, "algorithm_type"), *kl = sibling_text(r, algorithm, "kl_loss_fn");
    char *entropy = sibling_text(r, algorithm, "entropy_loss_fn");
    const char *of = type ? type : "ppo", *value = entry->values.items[0];
    bool is_sft = strcmp(of, "sft") == 0, is_dpo = strcmp(of, "dpo") == 0;
    bool has_kl = is_dpo || (kl ? strcmp(kl, "none") != 0 : mt_choice_index("dapo|sppo|sft", of) < 0);
    bool has_entropy = entropy ? strcmp(entropy, "none") != 0 : mt_choice_index("sppo|sft", of) < 0;
    if (row->kind == MT_KEY_DIVERGENCE && is_sft && has_kl) {
        set_kind(entry, MT_ENTRY_REFUSED, "can only be none here: samples of sft have no reference");
    } else if (row->kind == MT_KEY_PENALTY) {
        derive_penalty(r, entry, of, has_kl ? kl ? kl : "k2" : NULL);
    } else if (row->kind == MT_KEY_DIVERGENCE && !has_kl) {
        set_kind(entry, MT_ENTRY_FIXED, "the loss has no divergence");
    } else if (row->kind == MT_KEY_DIVERGENCE && strcmp(value, "none") == 0) {
        mt_string_set(&entry->values.items[0], "k2");
        entry->is_derived = true;
    } else if (row->kind == MT_KEY_KL_COEF && !has_kl) {
        set_kind(entry, MT_ENTRY_UNUSED, "kl_loss_fn, which is none");
    } else if (row->kind == MT_KEY_ENTROPY_COEF && !has_entropy) {
        set_kind(entry, MT_ENTRY_UNUSED, "entropy_loss_fn, which is none");
    } else if (row->kind == MT_KEY_ENTROPY_COEF && (is_sft || is_dpo)) {
        bool is_none = number == 0 && *value != 0;
        set_kind(entry, is_none ? MT_ENTRY_FIXED : MT_ENTRY_REFUSED,
                 is_none ? "the loss has no entropy" : "can only be 0 here: losses of samples have no entropy");
    } else if (row->kind == MT_KEY_AGGREGATION) {
        const mt_yaml_node *args = mt_yaml_get(algorithm, "policy_loss_fn_args");
        char *loss = sibling_text(r, algorithm, "policy_loss_fn");
        bool has_args = args && args->kind == MT_YAML_SECTION && args->count > 0;
        bool is_own = has_args && !mt_yaml_get(args, "loss_agg_mode") && strcmp(loss ? loss : of, "gspo") != 0;
        if (strcmp(value, "token-mean") != 0 && (is_sft || is_dpo))
            set_kind(entry, MT_ENTRY_REFUSED, "can only be token-mean here: losses of samples are means over tokens");
        else if (is_sft || is_dpo)
            set_kind(entry, MT_ENTRY_FIXED, "losses of samples are means over tokens");
        else if (strcmp(value, "token-mean") != 0 && is_own)
            set_kind(
                entry, MT_ENTRY_REFUSED,
                "is not that of the policy's loss, which is token-mean where policy_loss_fn_args has none; give it "
                "there too");
        free(loss);
    }
    free(type), free(kl), free(entropy);
}

/* ROLL's micro-batches by tokens: of responses, sequence packing makes them. */
static void derive_dynamic(reader *r, const mt_role_key *row, const mt_yaml_node *mapping, double number,
                           mt_role_entry *entry) {
    char *flag = sibling_text(r, mapping, "use_dynamic_batching_in_train"), path[160];
    bool is_on = false, is_rl = r->stage && strcmp(r->stage, "rl") == 0;
    if (row->kind == MT_KEY_DYNAMIC && is_rl) {
        mt_string_set(&entry->option, "sequence-packing");
    } else if (row->kind == MT_KEY_TOKENS) {
        bool is_used = flag && mt_parse_bool(flag, &is_on) && is_on && !is_rl;
        snprintf(path, sizeof path, "%.80s.strategy_args.strategy_config.context_parallel_size", r->role);
        if (!is_used)
            set_kind(entry, MT_ENTRY_UNUSED,
                     is_rl ? "rows of --sequence-packing" : "use_dynamic_batching_in_train, which is not true");
        else
            set_number(entry, ceil(number / fmax(path_number(r, path, 1), 1)));
    }
    free(flag);
}

/* Changes the entry of a key whose value depends on other keys too. */
static void derive_of_distillation(reader *r, const mt_role_key *row, const mt_yaml_node *mapping,
                                   mt_role_entry *entry);

/* The teachers of verl's teacher_models besides `teacher_model`, which counts only where it is alone. */
static int64_t count_teachers(const mt_yaml_node *models) {
    int64_t count = 0;
    for (int64_t i = 0; models && models->kind == MT_YAML_SECTION && i < models->count; i++)
        count += models->values[i]->kind == MT_YAML_SECTION && strcmp(models->keys[i]->text, "teacher_model") != 0;
    return count;
}

/* The text of a path from the root, to free; NULL: there is none, or it is no text. */
static char *path_text(reader *r, const char *path) {
    mt_error *error = r->yaml->error, ignored;
    mt_yaml_node *node;
    char *text = NULL;
    r->yaml->error = &ignored;
    bool found = mt_yaml_find_path(r->yaml, path, r->yaml->root, &node) == 0 && mt_yaml_follow(r->yaml, &node) == 0;
    if (found && node->kind == MT_YAML_TEXT && !mt_yaml_is_null(node)) text = mt_yaml_value(r->yaml, node, true);
    r->yaml->error = error;
    return text;
}

static bool is_sibling_true(reader *r, const mt_yaml_node *section, const char *name) {
    char *text = sibling_text(r, section, name);
    bool is_true = false, known = text && mt_parse_bool(text, &is_true);
    free(text);
    return known && is_true;
}

/* verl's mtp: without `enable` the modules of the model's folder are left out. Loaded modules train here. */
static void derive_of_mtp(reader *r, const mt_yaml_node *mapping, mt_role_entry *entry) {
    bool loads = is_sibling_true(r, mapping, "enable");
    bool trains = loads && is_sibling_true(r, mapping, "enable_train");
    bool drafts = loads && is_sibling_true(r, mapping, "enable_rollout");
    char *server = path_text(r, "actor_rollout_ref.rollout.name");
    bool has_steps = server && strcmp(server, "sglang") == 0;
    free(server);
    if (strcmp(entry->name, "enable") == 0 && !loads)
        mt_string_set(&entry->values.items[0], "0");
    else if (strcmp(entry->name, "enable") == 0)
        set_kind(entry, trains ? MT_ENTRY_FIXED : MT_ENTRY_REFUSED,
                 trains ? "the modules of the model's folder"
                        : "loads modules that enable_train does not train; here they train or are left out");
    else if (strcmp(entry->name, "detach_encoder") == 0)
        set_kind(entry, trains && is_sibling_true(r, mapping, "detach_encoder") ? MT_ENTRY_REFUSED : MT_ENTRY_FIXED,
                 "the gradient of the modules reaches the model");
    else if (strcmp(entry->name, "mtp_loss_scaling_factor") == 0 && !trains)
        set_kind(entry, MT_ENTRY_UNUSED, "enable and enable_train, which are not both true");
    else if (strstr(entry->name, "speculative") && !drafts)
        set_kind(entry, MT_ENTRY_UNUSED, "enable and enable_rollout, which are not both true");
    else if (strstr(entry->name, "speculative") && has_steps != (strcmp(entry->name, "speculative_num_steps") == 0))
        set_kind(entry, MT_ENTRY_UNUSED, has_steps ? "vLLM" : "SGLang");
}

static void derive_value(reader *r, const mt_role_key *row, const mt_yaml_node *mapping, mt_role_entry *entry) {
    double number = 0;
    bool is_true = false, numeric = is_number(entry->values.items[0], &number);
    char *flag = sibling_text(r, mapping, row->kind == MT_KEY_ENABLED ? "enable" : "use_kl_loss");
    if (row->kind == MT_KEY_LENGTH && numeric) {
        double response = sibling_number(r, mapping, "response_length", 0);
        double of_verl = strcmp(entry->name, "max_prompt_length") == 0 ? VERL_LENGTH : response;
        response = sibling_number(r, mapping, "max_response_length", of_verl);
        response = sibling_number(r, mapping, "max_response_tokens", response);
        double whole = sibling_number(r, mapping, "sequence_length", 0);
        if (sibling_number(r, mapping, "max_model_len", whole) == 0)
            set_number(entry, number + response);
        else
            entry->kind = MT_ENTRY_UNUSED, mt_string_set(&entry->text, "the whole length has prompt and response");
    } else if (row->kind == MT_KEY_MINI_BATCH && numeric) {
        double responses = path_number(r, "actor_rollout_ref.rollout.n", 1);
        set_number(entry, number * sibling_number(r, mapping, "rollout_n", responses));
    } else if (row->kind == MT_KEY_DUAL_CLIP && mt_parse_bool(entry->values.items[0], &is_true)) {
        set_number(entry, 1 + 2 * sibling_number(r, mapping, "pg_clip", 0.2));
        if (!is_true) entry->kind = MT_ENTRY_FIXED, mt_string_set(&entry->text, "off");
    } else if (row->kind == MT_KEY_LOSS_COEF && numeric) {
        if (!flag || !mt_parse_bool(flag, &is_true) || !is_true) set_number(entry, 0);
    } else if (row->kind == MT_KEY_LR_SHARE) {
        bool is_actor = strncmp(r->key, "algorithm.", 10) == 0 || strstr(r->key, "actor_rollout_ref.actor.");
        double lr = sibling_number(r, mapping, "lr", is_actor ? VERL_LR : 0);
        set_number(entry, number * lr);
        if (!numeric || (number > 0 && lr <= 0))
            entry->kind = MT_ENTRY_REFUSED, mt_string_set(&entry->text, "is a share of lr: give both as numbers");
    } else if (row->kind == MT_KEY_ENABLED) {
        if (!flag || !mt_parse_bool(flag, &is_true) || !is_true)
            entry->kind = MT_ENTRY_FIXED, mt_string_set(&entry->text, "off: enable is not true");
    } else if (row->kind == MT_KEY_DISTILL_COEF || row->kind == MT_KEY_DISTILL_CLIP ||
               row->kind == MT_KEY_DISTILL_TOPK) {
        derive_of_distillation(r, row, mapping, entry);
    } else if (row->kind == MT_KEY_MTP) {
        derive_of_mtp(r, mapping, entry);
    } else if (row->kind == MT_KEY_TEACHER_KEY) {
        if (count_teachers(mt_yaml_get(mapping, "teacher_models")) == 0)
            set_kind(entry, MT_ENTRY_UNUSED, "several teachers: one has all prompts");
    } else if (row->kind == MT_KEY_DIST_PATH) {
        char *use = sibling_text(r, mapping, "use_dist_checkpointing");
        bool is_off = use && mt_parse_bool(use, &is_true) && !is_true;
        entry->kind = is_off ? MT_ENTRY_UNUSED : MT_ENTRY_REFUSED;
        mt_string_set(&entry->text, is_off ? "use_dist_checkpointing, which is false" : row->text);
        free(use);
    } else if (row->kind == MT_KEY_GEN_BATCH) {
        bool same = numeric && number == sibling_number(r, mapping, "train_batch_size", VERL_BATCH);
        char reason[200];
        snprintf(reason, sizeof reason, "can only be train_batch_size here: %s", row->text);
        entry->kind = same ? MT_ENTRY_FIXED : MT_ENTRY_REFUSED;
        mt_string_set(&entry->text, same ? row->text : reason);
    } else if (row->kind == MT_KEY_ALGORITHM) {
        derive_algorithm(r, mapping, entry);
    } else if (row->kind >= MT_KEY_DIVERGENCE && row->kind <= MT_KEY_AGGREGATION) {
        derive_loss(r, row, numeric ? number : NAN, entry);
    } else if (row->kind == MT_KEY_REWARD_NORM) {
        char *shift = sibling_text(r, mapping, "reward_shift");
        bool shifts = shift && mt_parse_bool(shift, &is_true) && is_true;
        if (!shifts && entry->kind == MT_ENTRY_OPTION)
            add_option(r, entry->line, "norm-std-type", entry->values.items[0])->is_implied = true;
        free(shift);
    } else if (row->kind == MT_KEY_FREEZE) {
        if (entry->kind == MT_ENTRY_OPTION) add_option(r, entry->line, "freeze-projector", "true")->is_implied = true;
    } else if (row->kind >= MT_KEY_TRAJECTORIES && row->kind <= MT_KEY_NORM_METHOD) {
        derive_of_environments(r, row, mapping, number, entry);
    } else if (row->kind == MT_KEY_DYNAMIC || (row->kind == MT_KEY_TOKENS && numeric)) {
        derive_dynamic(r, row, mapping, number, entry);
    } else if (row->kind == MT_KEY_GROUP_LIMIT) {
        double share = 1 / fmax(sibling_number(r, mapping, "num_return_sequences_in_group", 1), 1);
        bool is_low = strcmp(entry->name, "difficulty_low_threshold") == 0;
        bool good = numeric && (is_low ? number >= 0 && number <= share : number <= 1 && number >= 1 - share);
        entry->kind = good ? MT_ENTRY_FIXED : MT_ENTRY_REFUSED;
        mt_string_set(&entry->text, good ? row->text
                                         : "drops more than the groups whose rewards are all alike, which "
                                           "--dynamic-sampling drops");
    }
    free(flag);
}

/* verl's distillation_loss: keys that only some of its forms read. */
static void derive_of_distillation(reader *r, const mt_role_key *row, const mt_yaml_node *mapping,
                                   mt_role_entry *entry) {
    bool is_coef = row->kind == MT_KEY_DISTILL_COEF, is_true = is_coef;
    if (row->kind == MT_KEY_DISTILL_TOPK) {
        char *mode = sibling_text(r, mapping, "loss_mode");
        if (!mode || strcmp(mode, "forward_kl_topk") != 0) set_kind(entry, MT_ENTRY_UNUSED, "forward_kl_topk alone");
        free(mode);
        return;
    }
    char *flag = sibling_text(r, mapping, is_coef ? "use_task_rewards" : "use_policy_gradient");
    if (flag) (void)mt_parse_bool(flag, &is_true);
    free(flag);
    if (!is_true)
        set_kind(entry, MT_ENTRY_UNUSED,
                 is_coef ? "use_task_rewards, which is false" : "use_policy_gradient, which is not true");
}

/* ---- the walk --------------------------------------------------------------------------------------------------- */

static int walk(reader *r, mt_yaml_node *mapping, const char *section, bool roles);

/* Takes a section, or a list with one. */
static int take_section(reader *r, mt_yaml_node *node, const char *section, long long line) {
    if (node->kind == MT_YAML_LIST && node->count == 1) node = node->values[0];
    if (node->kind != MT_YAML_SECTION)
        return mt_error_set(r->yaml->error, "%s%s expects a section of keys", mt_yaml_place_of(r->yaml, line).text,
                            r->key);
    r->depth++;
    int status = walk(r, node, section, false);
    if (status == 0) status = walk(r, node, section, true);
    r->depth--;
    return status;
}

/* The section of an engine, whose name is beside it. That of another engine may be in a file that is not there. */
static int take_strategy(reader *r, const mt_role_key *row, const mt_yaml_node *mapping, mt_yaml_node *node,
                         long long line) {
    char *name = NULL;
    mt_yaml_node *sibling = mt_yaml_get(mapping, "strategy_name");
    if (sibling && mt_yaml_follow(r->yaml, &sibling) != 0) return -1;
    if (sibling && !(name = mt_yaml_expand(r->yaml, sibling))) return -1;
    bool is_megatron = name && strncasecmp(name, "megatron", 8) == 0; // of any case, as mt_role_key_translate
    int status = is_megatron ? mt_yaml_follow(r->yaml, &node) : 0;
    if (status == 0 && is_megatron && !mt_yaml_is_null(node)) status = take_section(r, node, row->text, line);
    if (!is_megatron && !r->is_other)
        add_entry(r, MT_ENTRY_UNUSED, line, name && *name ? name : "the engine without a strategy_name");
    free(name);
    return status;
}

/* An option of Megatron-LM's name. */
static int take_megatron(reader *r, const char *section, const char *name, mt_yaml_node *node, long long line) {
    char nearest[112] = "";
    int64_t index = r->config->count;
    bool has_value = !mt_yaml_is_null(node) && !mt_yaml_is_empty(node) && !r->is_other;
    int status = has_value ? take_values(r, NULL, name, node, line) : 0;
    if (!has_value) add_option(r, line, name, NULL)->is_megatron = true;
    r->config->entries[index].is_name = r->is_other;
    bool is_searched = status == 0 && r->num_searched++ < MAX_SEARCHED;
    if (is_searched && mt_role_key_nearest(nearest, section, name))
        mt_string_set(&r->config->entries[index].text, nearest);
    return status;
}

/* The keys of a JSON file, which is YAML too; messages name the line of the key that has its path. */
static int take_file(reader *r, const mt_role_key *row, const mt_yaml_node *node, long long line) {
    char *path = mt_yaml_expand(r->yaml, node);
    int64_t first = r->config->count;
    mt_yaml inner, *outer = r->yaml;
    int status = path ? mt_yaml_open_file(&inner, path, MAX_FILE, outer->error) : -1;
    if (status == 0) {
        r->yaml = &inner;
        status = inner.root ? take_section(r, inner.root, row->text, line) : 0;
        for (int64_t i = first; i < r->config->count; i++) r->config->entries[i].line = line;
        r->yaml = outer;
        mt_yaml_close(&inner);
    }
    free(path);
    return status;
}

/* A section or a list that is refused, unless the section is off or the list is empty. */
static void take_refused(reader *r, const mt_role_key *row, const mt_yaml_node *node, long long line) {
    char *enable = sibling_text(r, node, "enable"), reason[400];
    bool is_on = true;
    if (!enable) enable = sibling_text(r, node, "enabled");
    bool is_off = mt_yaml_is_empty(node) || (enable && mt_parse_bool(enable, &is_on) && !is_on);
    snprintf(reason, sizeof reason, "is not supported: %s", row->text);
    add_entry(r, is_off ? MT_ENTRY_FIXED : MT_ENTRY_REFUSED, line, is_off ? row->text : reason);
    free(enable);
}

/* A section as one text of an option. */
static int take_json(reader *r, const mt_role_key *row, mt_yaml_node *node, long long line) {
    if (mt_yaml_is_empty(node)) {
        add_entry(r, MT_ENTRY_FIXED, line, "empty");
        return 0;
    }
    if (node->kind != MT_YAML_SECTION)
        return mt_error_set(r->yaml->error, "%s%s expects a section", mt_yaml_place_of(r->yaml, line).text, r->key);
    json_t *json = mt_yaml_json(r->yaml, node);
    char *text = json ? json_dumps(json, 0) : NULL;
    json_decref(json);
    if (!text) return -1;
    add_option(r, line, row->text, text);
    free(text);
    return 0;
}

/* Shares of domains or files, a mapping, a list or a text with commas: one share is all of them. */
static int take_shares(reader *r, const mt_role_key *row, const mt_yaml_node *node, long long line) {
    bool is_text = node->kind == MT_YAML_TEXT, is_one = false;
    char *text = is_text ? mt_yaml_expand(r->yaml, node) : NULL, reason[200];
    if (is_text && !text) return -1;
    if (is_text)
        is_one = !strchr(text, ',');
    else
        is_one = node->count <= 1;
    snprintf(reason, sizeof reason, "is not supported: %s", row->text);
    add_entry(r, is_one ? MT_ENTRY_FIXED : MT_ENTRY_REFUSED, line, is_one ? "one share is all" : reason);
    free(text);
    return 0;
}

/* Shares of domains: each has the tags of its section of `rewards`, and ROLL's math_rule those of no other. */
static int take_domains(reader *r, const mt_role_key *row, const mt_yaml_node *node, long long line) {
    if (node->kind != MT_YAML_SECTION)
        return mt_error_set(r->yaml->error, "%s%s expects a section of domains and their shares",
                            mt_yaml_place_of(r->yaml, line).text, r->key);
    if (node->count <= 1) {
        add_entry(r, MT_ENTRY_FIXED, line, "one share is all");
        return 0;
    }
    int64_t index = r->config->count;
    add_option(r, line, row->text, NULL)->is_sequence = true;
    mt_yaml_node *rewards = mt_yaml_get(r->yaml->root, "rewards");
    for (int64_t i = 0; i < node->count; i++) {
        const char *name = node->keys[i]->text;
        mt_yaml_node *share = node->values[i], *reward = mt_yaml_get(rewards, name);
        const mt_yaml_node *tags = mt_yaml_get(reward, "tag_included");
        char *word = NULL, *text = NULL;
        size_t size;
        FILE *file = open_memstream(&word, &size);
        MT_CHECK(file);
        fprintf(file, "%s%s", name, strcmp(name, "math_rule") == 0 ? ",*" : "");
        for (int64_t j = 0; tags && tags->kind == MT_YAML_LIST && j < tags->count; j++)
            fprintf(file, ",%s", tags->values[j]->text);
        bool good = mt_yaml_visit(r->yaml, share) == 0 && mt_yaml_follow(r->yaml, &share) == 0;
        if (good) text = mt_yaml_expand(r->yaml, share);
        fprintf(file, "=%s", text ? text : "");
        MT_CHECK(fclose(file) == 0);
        if (text) mt_strings_add(&r->config->entries[index].values, word);
        good = text != NULL;
        free(text), free(word);
        if (!good) return -1;
    }
    return 0;
}

/* The section of an adapter: without a rank its keys have no effect, and their names are checked. */
static int take_adapter(reader *r, const mt_role_key *row, mt_yaml_node *node, long long line) {
    static const char *const needed[] = {"type", "alpha", "target_modules", "lora_A_init_method"};
    bool is_on = node->kind == MT_YAML_SECTION && sibling_number(r, node, "rank", 0) > 0, is_other = r->is_other;
    if (!is_on) add_entry(r, MT_ENTRY_FIXED, line, "off: rank is 0");
    for (size_t i = 0; i < sizeof needed / sizeof *needed && is_on; i++) {
        char reason[80];
        snprintf(reason, sizeof reason, "needs %s, whose default here is another", needed[i]);
        if (!mt_yaml_get(node, needed[i])) add_entry(r, MT_ENTRY_REFUSED, line, reason);
    }
    r->is_other = is_other || !is_on;
    int status = take_section(r, node, row->text, line);
    r->is_other = is_other;
    return status;
}

/* verl's section of on-policy distillation, if it is enabled. */
static int take_distillation(reader *r, const mt_role_key *row, mt_yaml_node *node, long long line) {
    char *enabled = sibling_text(r, node, "enabled");
    bool is_on = false;
    if (enabled) (void)mt_parse_bool(enabled, &is_on);
    free(enabled);
    if (is_on) return take_section(r, node, row->text, line);
    add_entry(r, MT_ENTRY_FIXED, line, "off: enabled is not true");
    return 0;
}

/* verl's teachers, each {key, model_path, inference}. */
static int take_teachers(reader *r, mt_yaml_node *node, long long line) {
    bool several = count_teachers(node) > 0;
    size_t length = strlen(r->key);
    mt_strings words = {0};
    int status = node->kind == MT_YAML_SECTION ? 0 : mt_yaml_fail(r->yaml, node, "expects a section of teachers");
    for (int64_t i = 0; status == 0 && i < node->count; i++) {
        mt_yaml_node *teacher = node->values[i];
        const char *name = node->keys[i]->text;
        snprintf(r->key + length, MAX_KEY - length, ".%.80s", name);
        if (mt_yaml_follow(r->yaml, &teacher) != 0) {
            status = -1;
        } else if (teacher->kind != MT_YAML_SECTION || (several && strcmp(name, "teacher_model") == 0)) {
            add_entry(r, MT_ENTRY_UNUSED, node->keys[i]->line, "teachers: their sections have names");
        } else if (!several) {
            status = take_section(r, teacher, "verl.teacher", node->keys[i]->line);
        } else {
            char *key = sibling_text(r, teacher, "key"), *path = sibling_text(r, teacher, "model_path"), word[4400];
            snprintf(word, sizeof word, "%.300s=%.4000s", key ? key : "", path ? path : "");
            if (key && path)
                mt_strings_add(&words, word);
            else
                add_entry(r, MT_ENTRY_REFUSED, node->keys[i]->line, "needs key and model_path");
            free(key), free(path);
            status = take_section(r, teacher, "verl.teachers", node->keys[i]->line);
        }
        r->key[length] = 0;
    }
    if (status == 0 && words.count > 0) {
        mt_role_entry *entry = add_option(r, line, "teachers", NULL);
        for (int64_t i = 0; i < words.count; i++) mt_strings_add(&entry->values, words.items[i]);
        entry->is_sequence = true;
    }
    mt_strings_free(&words);
    return status;
}

/* A key of a value that is not null. `node` is its value. */
static int take_row(reader *r, const mt_role_key *row, const mt_yaml_node *mapping, mt_yaml_node *node,
                    long long line) {
    int64_t index = r->config->count;
    char value[400];
    bool is_on = true;
    if (row->kind == MT_KEY_SECTION) return take_section(r, node, row->text, line);
    if (row->kind == MT_KEY_EXPERIENCE && r->stage && mt_choice_index(TRINITY_STAGES, r->stage) >= 0)
        return take_section(r, node, row->text, line);
    if (row->kind == MT_KEY_EXPERIENCE) {
        add_entry(r, MT_ENTRY_UNUSED, line, "Trinity-RFT's explorer and buffer");
        return 0;
    }
    if (row->kind == MT_KEY_LOSS_COEF && r->stage && strcmp(r->stage, "dpo") == 0) {
        add_entry(r, MT_ENTRY_UNUSED, line, "a loss of responses");
        return 0;
    }
    bool draws_none =
        strcmp(row->section, "trinity.synchronizer") == 0 && r->stage && mt_choice_index(TRINITY_STAGES, r->stage) >= 0;
    if (draws_none) {
        add_entry(r, MT_ENTRY_UNUSED, line, "responses: samples come from files");
        return 0;
    }
    if (row->kind == MT_KEY_DEVICES) return take_devices(r, node, line);
    if (row->kind == MT_KEY_ADAPTER) return take_adapter(r, row, node, line);
    if (row->kind == MT_KEY_DISTILLATION) return take_distillation(r, row, node, line);
    if (row->kind == MT_KEY_TEACHERS) return take_teachers(r, node, line);
    bool is_off =
        row->kind == MT_KEY_ADDITIONAL && node->kind == MT_YAML_TEXT && mt_parse_bool(node->text, &is_on) && !is_on;
    if (is_off) return 0;
    if (row->kind == MT_KEY_ADDITIONAL && node->kind == MT_YAML_TEXT) return take_file(r, row, node, line);
    if (row->kind == MT_KEY_ADDITIONAL) return mt_yaml_is_empty(node) ? 0 : take_section(r, node, row->text, line);
    if (row->kind == MT_KEY_DOMAINS) return take_domains(r, row, node, line);
    if (row->kind == MT_KEY_JSON) return take_json(r, row, node, line);
    if (row->kind == MT_KEY_SHARES) return take_shares(r, row, node, line);
    if (row->kind == MT_KEY_REFUSED && node->kind != MT_YAML_TEXT) {
        take_refused(r, row, node, line);
        return 0;
    }
    if (take_values(r, row->kind == MT_KEY_FIXED ? NULL : row, row->text, node, line) != 0) return -1;
    mt_role_entry *entry = &r->config->entries[index];
    entry->is_megatron = false;
    const char *first = entry->values.count > 0 ? entry->values.items[0] : "";
    if (entry->kind == MT_ENTRY_REFUSED) return 0;
    if (row->kind == MT_KEY_FIXED || row->kind == MT_KEY_REFUSED) {
        bool is_none = !*first || (strncmp(node->text, "${", 2) == 0 && strcmp(first, "null") == 0);
        bool good = row->kind == MT_KEY_FIXED ? is_none || mt_role_key_translate(row, first, value, sizeof value)
                                              : is_none || (mt_parse_bool(first, &is_on) && !is_on);
        char reason[400];
        int first_choice = row->values ? (int)strcspn(row->values, "|") : 0;
        if (row->kind == MT_KEY_FIXED && strlen(row->values) > 200)
            snprintf(reason, sizeof reason, "cannot be %.100s here: %s; take %.*s or leave it out", first, row->text,
                     first_choice, row->values);
        else if (row->kind == MT_KEY_FIXED)
            snprintf(reason, sizeof reason, "can only be %s here: %s", row->values, row->text);
        else
            snprintf(reason, sizeof reason, "is not supported: %s", row->text);
        entry->kind = good ? MT_ENTRY_FIXED : MT_ENTRY_REFUSED;
        mt_string_set(&entry->text, good ? row->text : reason);
    } else if (entry->values.count == 0 || (!*first && !entry->is_sequence) ||
               (strncmp(node->text, "${", 2) == 0 && strcmp(first, "null") == 0)) {
        entry->kind = MT_ENTRY_FIXED; // the value that stands for the default, or an empty list
        mt_string_set(&entry->text, "the default");
    } else if (row->kind == MT_KEY_FILES) {
        expand_home(entry);
        find_files(r, mapping, entry);
    } else if (row->kind == MT_KEY_MODEL) {
        expand_home(entry);
        add_option(r, line, "finetune", "true")->is_implied = true;
    } else if (row->kind == MT_KEY_OFFLOAD) {
        add_option(r, line, "grad-offload", first)->is_implied = true;
        add_option(r, line, "optimizer-offload", first)->is_implied = true;
    } else if (row->kind == MT_KEY_BETAS) {
        if (entry->values.count != 2)
            return mt_error_set(r->yaml->error, "%sbetas expects two numbers", mt_yaml_place_of(r->yaml, line).text);
        char *second = entry->values.items[--entry->values.count];
        entry->is_sequence = false;
        add_option(r, line, "adam-beta2", second);
        free(second);
    } else if (row->kind == MT_KEY_STEPS) {
        double share = strtod(first, NULL);
        if (share > 0 && share < 1) mt_string_set(&entry->option, mt_share_option(row->text));
    } else if (row->kind == MT_KEY_OPTION) {
        const mt_option *option = mt_option_find(row->text, strlen(row->text));
        if (option && option->type == MT_STRING) expand_home(entry);
    } else {
        derive_value(r, row, mapping, entry);
    }
    return 0;
}

/* True for the section of the role itself, not for a part of another role's, or one of several roles. */
static bool is_own_section(const mt_role_key *row, const char *role) {
    static const char *const own[] = {"role", "verl.actor", "verl.critic", "verl.reward"};
    bool is_own = strcmp(row->text, "verl.rollout") == 0 && strcmp(role, "actor_infer") == 0;
    for (size_t i = 0; i < sizeof own / sizeof *own && !is_own; i++) is_own = strcmp(row->text, own[i]) == 0;
    return is_own;
}

/* True if the run of the actor trains a critic, as by default in verl. */
static bool trains_critic(reader *r) {
    char *estimator = path_text(r, "algorithm.adv_estimator"), *type = path_text(r, "algorithm.algorithm_type");
    bool is_gae = estimator ? strcmp(estimator, "gae") == 0 : !type || strcmp(type, "ppo") == 0;
    free(estimator), free(type);
    return is_gae && strcmp(r->role, "actor_train") == 0;
}

/* A value of another role; row NULL: its name is an option's. One that is none of an option's choices, and a setting of
 * the critic's training that is not the actor's, which it trains with, are refused. */
static int check_other(reader *r, const mt_role_key *row, const mt_yaml_node *node, const char *name, long long line) {
    bool is_steps = row && row->kind == MT_KEY_STEPS;
    const char *own = !row ? name : row->kind == MT_KEY_OPTION ? row->text : "";
    const mt_option *option = *own ? mt_option_find(own, strlen(own)) : NULL;
    char value[400], reason[600], path[MAX_KEY + 40];
    bool is_shared = strncmp(r->key, "critic.optim.", 13) == 0 || strcmp(r->key, "critic.loss_agg_mode") == 0 ||
                     strcmp(r->key, "critic.ppo_epochs") == 0;
    if (!row && !is_shared) return 0; // another engine's names
    bool is_critic = is_shared && (option || is_steps) && trains_critic(r);
    if (node->kind != MT_YAML_TEXT || mt_yaml_is_null(node) || (!option && !is_critic)) return 0;
    char *text = mt_yaml_expand(r->yaml, node);
    if (!text) return -1;
    bool is_known = true;
    if (row)
        is_known = mt_role_key_translate(row, text, value, sizeof value) && *value && strncmp(value, "--", 2) != 0;
    else
        snprintf(value, sizeof value, "%s", text);
    if (option && option->type == MT_CHOICE && is_known && mt_choice_index(option->values, value) < 0) {
        snprintf(reason, sizeof reason, "expects %.400s, got '%.100s'", option->values, text);
        add_entry(r, MT_ENTRY_REFUSED, line, reason);
        is_critic = false;
    }
    snprintf(path, sizeof path, "actor_rollout_ref.actor.%s", strchr(r->key, '.') ? strchr(r->key, '.') + 1 : "");
    char *actor = is_critic ? path_text(r, path) : NULL;
    double x, y;
    bool equal = !actor || strcmp(actor, text) == 0 || (is_number(actor, &x) && is_number(text, &y) && x == y);
    if (!equal) {
        snprintf(
            reason, sizeof reason,
            "is %.100s, and %.300s %.100s: the critic trains with the actor's settings, except lr; make them equal",
            text, path, actor);
        add_entry(r, MT_ENTRY_REFUSED, line, reason);
    }
    free(actor), free(text);
    return 0;
}

/* A key of another role: the names below it are checked. A section that a reference names is checked where it is. */
static int take_other(reader *r, const mt_yaml_node *mapping, mt_yaml_node *node, const char *name, const char *section,
                      long long line) {
    const mt_role_key *row = mt_role_key_find(section, name, r->role);
    if (!row && check_other(r, row, node, name, line) != 0) return -1;
    if (!row) return take_megatron(r, section, name, node, line);
    bool is_engine = strcmp(name, "strategy_name") == 0 || strcmp(name, "strategy") == 0;
    if (is_engine && row->kind == MT_KEY_FIXED && node->kind == MT_YAML_TEXT && !mt_yaml_is_null(node)) {
        char *engine = mt_yaml_expand(r->yaml, node), known[80], reason[400];
        if (!engine) return -1;
        snprintf(reason, sizeof reason, "can only be %s", row->values);
        if (!mt_role_key_translate(row, engine, known, sizeof known)) add_entry(r, MT_ENTRY_REFUSED, line, reason);
        free(engine);
    }
    if (node->kind != MT_YAML_SECTION) return check_other(r, row, node, name, line);
    if (row->kind == MT_KEY_STRATEGY) return take_strategy(r, row, mapping, node, line);
    bool is_section = row->kind == MT_KEY_SECTION || row->kind == MT_KEY_ADAPTER || row->kind == MT_KEY_ADDITIONAL;
    return is_section ? take_section(r, node, row->text, line) : 0;
}

/* A key: first those of the pipeline (roles: false), then the sections of roles. */
static int take_key(reader *r, const mt_yaml_node *mapping, const mt_yaml_node *key, mt_yaml_node *node,
                    const char *section, bool roles) {
    const char *name = key->text;
    char nearest[112];
    const mt_role_key *row = mt_role_key_find(section, name, r->role);
    bool applies = row && mt_role_key_applies(row, name, r->role);
    if ((row && row->kind == MT_KEY_SECTION && row->roles) != roles) return 0;
    if (row && row->kind == MT_KEY_OTHERS) {
        add_entry(r, MT_ENTRY_UNUSED, key->line, row->text);
        r->is_other = true;
        int status = take_other(r, mapping, node, name, row->values, key->line);
        r->is_other = false;
        return status;
    }
    bool is_megatron = !row && mt_role_section_is_megatron(section);
    if (r->is_other && (row || is_megatron)) return take_other(r, mapping, node, name, section, key->line);
    r->has_role = r->has_role || (roles && applies && is_own_section(row, r->role));
    if (roles && applies && strcmp(row->text, "teachers") == 0 && !r->distills && strcmp(r->role, "student") != 0) {
        add_entry(r, MT_ENTRY_UNUSED, key->line, "on-policy distillation: use_opd is not true");
        return 0;
    }
    if (row && !applies) {
        add_entry(r, MT_ENTRY_UNUSED, key->line, "other roles");
        return 0;
    }
    if (row && row->kind == MT_KEY_UNUSED) {
        add_entry(r, MT_ENTRY_UNUSED, key->line, row->text);
        return 0;
    }
    if (!row && r->depth == 1 && mt_yaml_refers_to(r->yaml, name)) {
        add_entry(r, MT_ENTRY_UNUSED, key->line, "a value that other keys refer to");
        return 0;
    }
    if (!row && !is_megatron) {
        bool found = r->num_unknown++ < MAX_UNKNOWN && mt_role_key_nearest(nearest, section, name);
        add_entry(r, MT_ENTRY_UNKNOWN, key->line, found ? nearest : "");
        return 0;
    }
    if (row && row->kind == MT_KEY_STRATEGY) return take_strategy(r, row, mapping, node, key->line);
    if (mt_yaml_follow(r->yaml, &node) != 0) return -1;
    if (is_megatron) return take_megatron(r, section, name, node, key->line);
    return mt_yaml_is_null(node) ? 0 : take_row(r, row, mapping, node, key->line);
}

static int walk(reader *r, mt_yaml_node *mapping, const char *section, bool roles) {
    if (mapping->kind != MT_YAML_SECTION) return mt_yaml_fail(r->yaml, mapping, "expects a section of keys");
    if (mt_yaml_check_keys(r->yaml, mapping) != 0) return -1;
    size_t length = strlen(r->key);
    for (int64_t i = 0; i < mapping->count; i++) {
        const mt_yaml_node *key = mapping->keys[i];
        if (mt_yaml_visit(r->yaml, mapping->values[i]) != 0) return -1;
        if (length + strlen(key->text) + 2 > MAX_KEY) return mt_yaml_fail(r->yaml, key, "has a long name");
        snprintf(r->key + length, MAX_KEY - length, "%s%s", length > 0 ? "." : "", key->text);
        int status = take_key(r, mapping, key, mapping->values[i], section, roles);
        r->key[length] = 0;
        if (status != 0) return -1;
    }
    return 0;
}

/* ---- the file --------------------------------------------------------------------------------------------------- */

static bool is_role(const mt_yaml_node *section) {
    static const char *const names[] = {"model_args", "training_args", "strategy_args",
                                        "worker_cls", "megatron",      "optim"};
    for (size_t i = 0; section && i < sizeof names / sizeof *names; i++)
        if (mt_yaml_get(section, names[i])) return true;
    return false;
}

/* The section with verl's keys: the file, or Trinity-RFT's trainer.trainer_config; NULL: none. */
static const mt_yaml_node *find_verl(reader *r) {
    const mt_yaml_node *root = r->yaml->root;
    if (mt_yaml_get(r->yaml->root, "actor_rollout_ref")) return root;
    const mt_yaml_node *trainer = mt_yaml_get(r->yaml->root, "trainer");
    const mt_yaml_node *config = trainer ? mt_yaml_get(trainer, "trainer_config") : NULL;
    return config && mt_yaml_get(config, "actor_rollout_ref") ? config : NULL;
}

/* True for a file of Trinity-RFT, which may leave verl's keys out. */
static bool is_trinity(const reader *r) {
    const mt_yaml_node *root = r->yaml->root;
    return mt_yaml_get(mt_yaml_get(root, "algorithm"), "algorithm_type") && mt_yaml_get(root, "buffer");
}

/* The roles of a file, with ", " between them. */
static void list_roles(reader *r, char roles[400]) {
    static const char *const names[] = {"sft_train",   "student",     "student_train", "student_infer", "teacher",
                                        "actor_train", "actor_infer", "reference",     "critic",        "reward"};
    static const char *const verl[][2] = {{"actor", "actor_train"}, {"rollout", "actor_infer"}, {"ref", "reference"}};
    size_t used = 0;
    *roles = 0;
    const mt_yaml_node *root = find_verl(r), *rewards = mt_yaml_get(r->yaml->root, "rewards");
    const mt_yaml_node *group = root ? mt_yaml_get(root, "actor_rollout_ref") : NULL;
    if (!group && is_trinity(r)) used += (size_t)snprintf(roles, 400, "actor_train, actor_infer, reference");
    if (!root) root = r->yaml->root;
    for (size_t i = 0; group && i < 3; i++)
        if (mt_yaml_get(group, verl[i][0]))
            used += (size_t)snprintf(roles + used, 400 - used, "%s%s", used ? ", " : "", verl[i][1]);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (is_role(mt_yaml_get(root, names[i])))
            used += (size_t)snprintf(roles + used, 400 - used, "%s%s", used ? ", " : "", names[i]);
    }
    if (group && is_role(mt_yaml_get(r->yaml->root, "reward_model")))
        used += (size_t)snprintf(roles + used, 400 - used, "%sreward", used ? ", " : "");
    if (!rewards || rewards->kind != MT_YAML_SECTION) return;
    for (int64_t i = 0; i < rewards->count && used < 300; i++)
        used += (size_t)snprintf(roles + used, 400 - used, "%srewards.%.60s", used ? ", " : "", rewards->keys[i]->text);
}

static long long line_of_root_key(const reader *r, const char *name) {
    const mt_yaml_node *root = r->yaml->root;
    for (int64_t i = 0; i < root->count; i++)
        if (strcmp(root->keys[i]->text, name) == 0) return root->keys[i]->line;
    return 1;
}

/* '_' equals '-'. */
static bool names_equal(const char *a, const char *b) {
    while (*a && (*a == '_' ? '-' : *a) == (*b == '_' ? '-' : *b)) a++, b++;
    return *a == *b;
}

/* The entry that sets an option; NULL: there is none. */
static const mt_role_entry *find_option(const reader *r, const char *option) {
    for (int64_t i = r->config->count - 1; i >= 0; i--) {
        const mt_role_entry *entry = &r->config->entries[i];
        if (entry->kind == MT_ENTRY_OPTION && entry->values.count > 0 && names_equal(entry->option, option))
            return entry;
    }
    return NULL;
}

/* True if the file sets an option, not to false. */
static bool is_set(const reader *r, const char *option) {
    const mt_role_entry *entry = find_option(r, option);
    bool is_on = true;
    return entry && (!mt_parse_bool(entry->values.items[0], &is_on) || is_on);
}

/* True for an option that the file's policy loss does not read: PPO and DPPO alone read clip_ratio_c, and verl's losses
 * of sequences have an aggregation of their own. ROLL's loss of sequences reads both, and the run refuses them; its
 * cispo has a range of its own. */
static bool is_idle_in_loss(const reader *r, const char *root, const char *option, const char *key) {
    const mt_role_entry *loss = find_option(r, "pg-variant");
    const char *variant = loss ? loss->values.items[0] : "ppo";
    bool is_verl = strcmp(root, "roll") != 0, is_ppo = mt_choice_index("ppo|vanilla|dppo_tv|dppo_kl", variant) >= 0;
    bool by_sequence = mt_choice_index("gspo|gmpo|sapo", variant) >= 0;
    bool is_trinity = strcmp(root, "trinity") == 0; // one loss_agg_mode is for all of its losses
    if (strcmp(option, "clip-ratio-c") == 0) return !is_ppo && (is_verl || !by_sequence);
    if (strncmp(key, "pg_clip", 7) == 0) return !is_verl && strcmp(variant, "cispo") == 0;
    return strcmp(option, "loss-agg-mode") == 0 && is_verl && by_sequence && !is_trinity;
}

static void drop_idle_in_loss(reader *r, const char *root) {
    for (mt_role_entry *entry = r->config->entries; entry < r->config->entries + r->config->count; entry++) {
        if (entry->kind != MT_ENTRY_OPTION || !is_idle_in_loss(r, root, entry->option, entry->name)) continue;
        entry->kind = MT_ENTRY_UNUSED;
        mt_string_set(&entry->text, "the policy loss of this file does not read it");
    }
}

/* True if the file has what a default needs. */
static bool has_condition(reader *r, const char *with) {
    const char *equals = strchr(with, '=');
    if (strncmp(with, "key ", 4) == 0) {
        bool is_on = false;
        for (const mt_role_entry *entry = r->config->entries; entry < r->config->entries + r->config->count; entry++)
            if (mt_text_ends_with(entry->key, with + 4) && entry->values.count > 0)
                is_on = mt_parse_bool(entry->values.items[0], &is_on) && is_on;
        return is_on;
    }
    if (!equals) return is_set(r, with);
    char option[80];
    snprintf(option, sizeof option, "%.*s", (int)(equals - with), with);
    const mt_role_entry *entry = find_option(r, option);
    return entry && strcmp(entry->values.items[0], equals + 1) == 0;
}

/* One option has the estimator of the divergence in rewards and of that in the loss: ROLL's in the loss is k3. */
static void settle_divergence(reader *r) {
    const mt_role_entry *coef = find_option(r, "kl-loss-coef");
    bool in_reward = is_set(r, "kl-in-reward");
    bool in_loss = coef ? strtod(coef->values.items[0], NULL) > 0 : has_condition(r, "key actor.use_kl_loss"); // verl's
    const char *of_loss = "k3", *of_reward = "k1"; // the defaults
    mt_role_entry *reward = NULL, *flag = NULL;
    for (mt_role_entry *entry = r->config->entries; entry < r->config->entries + r->config->count; entry++) {
        if (entry->kind != MT_ENTRY_OPTION || entry->values.count == 0) continue;
        if (strcmp(entry->option, "kl-in-reward") == 0) flag = entry;
        if (strcmp(entry->option, "kl-loss-type") != 0) continue;
        if (strcmp(entry->name, "kl_penalty") == 0)
            of_reward = entry->values.items[0], reward = entry;
        else
            of_loss = entry->values.items[0];
    }
    bool differ = in_reward && in_loss && strcmp(of_loss, of_reward) != 0;
    if (!reward && differ) reward = flag;
    if (!reward || (in_reward && !differ)) return;
    reward->kind = differ ? MT_ENTRY_REFUSED : MT_ENTRY_UNUSED;
    mt_string_set(&reward->text, differ ? "differs from the estimator in the loss; one --kl-loss-type serves both"
                                        : "rewards without a divergence");
}

/* The number that the file gives an option; 0: none. */
static double option_number(const reader *r, const char *option) {
    const mt_role_entry *entry = find_option(r, option);
    return entry ? strtod(entry->values.items[0], NULL) : 0;
}

/* True for Trinity-RFT's trainer_strategy of Megatron, whose warm-up begins at the least learning rate. */
static bool uses_megatron(reader *r) {
    char *strategy = path_text(r, "trainer.trainer_strategy");
    bool is_megatron = strategy && strncmp(strategy, "megatron", 8) == 0;
    free(strategy);
    return is_megatron;
}

/* The number of an absent key that follows from others; 0: it has none. */
static double derive_default(reader *r, const char *root, const char *rule) {
    bool is_roll = strcmp(root, "roll") == 0;
    double response = option_number(r, "max-new-tokens"), prompt = is_roll ? ROLL_PROMPT : VERL_LENGTH;
    const mt_role_entry *style = find_option(r, "lr-decay-style");
    bool is_constant = style && strcmp(style->values.items[0], "constant") == 0;
    double least = path_number(r, "algorithm.optimizer.min_lr_ratio", TRINITY_LR_SHARE) * option_number(r, "lr");
    bool warms_up = option_number(r, "lr-warmup-iters") > 0 || option_number(r, "lr-warmup-fraction") > 0;
    if (strcmp(rule, "=min_lr_ratio x lr") == 0) return is_constant ? 0 : least;
    if (strcmp(rule, "=the same with a warm-up") == 0) return warms_up && uses_megatron(r) ? least : 0;
    if (strcmp(rule, "=2 x lora-rank") == 0) return 2 * option_number(r, "lora-rank");
    if (strcmp(rule, "=256 x num-return-sequences") == 0) return 256 * option_number(r, "num-return-sequences");
    if (strcmp(rule, "=prompt + response") == 0) return response > 0 ? prompt + response : 0;
    MT_CHECK(strcmp(rule, "=sequence - prompt") == 0);
    return fmax(option_number(r, "seq-length") - path_number(r, "prompt_length", prompt), 0);
}

/* True if the file gives an option a value, or says that it has its default here. */
static bool decides_option(const reader *r, const char *option) {
    for (const mt_role_entry *entry = r->config->entries; entry < r->config->entries + r->config->count; entry++)
        if (entry->option && entry->values.count > 0 && names_equal(entry->option, option) &&
            (entry->kind == MT_ENTRY_OPTION || entry->kind == MT_ENTRY_FIXED))
            return true;
    return false;
}

/* Adds the defaults of keys that the file does not have. */
static void add_defaults(reader *r, const char *root) {
    const mt_role_entry *loss = find_option(r, "pg-variant");
    const char *stage = r->stage ? r->stage : "infer";
    bool is_cispo = loss && strcmp(loss->values.items[0], "cispo") == 0;
    for (const mt_role_default *row = mt_role_defaults; row->root; row++) {
        char value[32];
        if (strcmp(row->root, root) != 0 || (row->stage && strcmp(row->stage, stage) != 0)) continue;
        if (!row->stage && !r->stage) continue; // of training
        if (is_idle_in_loss(r, root, row->option, row->key)) continue;
        if (strncmp(row->key, "cispo_", 6) == 0 && !is_cispo) continue;
        if (decides_option(r, row->option) || (row->with && !has_condition(r, row->with))) continue;
        if (row->unless && is_set(r, row->unless)) continue;
        double number = *row->value == '=' ? derive_default(r, root, row->value) : 1;
        if (number == 0) continue;
        if (*row->value == '=') mt_real_print(value, number);
        snprintf(r->key, sizeof r->key, "(absent: %s)", row->key);
        add_option(r, 0, row->option, *row->value == '=' ? value : row->value)->is_implied = true;
        *r->key = 0;
    }
}

/* Adds --stage and the defaults of a role that trains. */
static void add_stage(reader *r, const mt_role_stage *row, const char *root) {
    const char *name = row->key ? row->key : row->role;
    if (!mt_yaml_get(r->yaml->root, name) && mt_yaml_get(r->yaml->root, "student_train")) name = "student_train";
    if (!mt_yaml_get(r->yaml->root, name)) name = strcmp(root, "trinity") == 0 ? "trainer" : "actor_rollout_ref";
    snprintf(r->key, sizeof r->key, "%s", name);
    add_option(r, line_of_root_key(r, name), "stage", row->stage)->is_implied = true;
    *r->key = 0;
    drop_idle_in_loss(r, root);
    if (strcmp(root, "trinity") != 0) settle_divergence(r); // derive_penalty did
    add_defaults(r, root);
}

/* True if the strategy_name of the role, if there is one, is an engine that trains. */
static bool has_training_strategy(reader *r) {
    char path[200];
    mt_error ignored, *error = r->yaml->error;
    mt_yaml_node *node;
    snprintf(path, sizeof path, "%.100s.strategy_args.strategy_name", r->role);
    r->yaml->error = &ignored;
    bool found = mt_yaml_find_path(r->yaml, path, r->yaml->root, &node) == 0;
    char *name = found && mt_yaml_follow(r->yaml, &node) == 0 ? mt_yaml_expand(r->yaml, node) : NULL;
    r->yaml->error = error;
    size_t length = name ? strlen(name) : 0;
    bool trains = !name || (length > 6 && strcasecmp(name + length - 6, "_train") == 0);
    free(name);
    return trains;
}

/* The stage of Trinity-RFT's actor: that of algorithm_type, or the one at hand. */
static const mt_role_stage *trinity_stage(reader *r, const mt_role_stage *stage) {
    char *type = sibling_text(r, mt_yaml_get(r->yaml->root, "algorithm"), "algorithm_type");
    if (type && mt_choice_index(TRINITY_STAGES, type) >= 0)
        for (stage = mt_role_stages; strcmp(stage->stage, type) != 0;) stage++;
    free(type);
    return stage;
}

/* ROLL's on-policy distillation: the options of use_opd, or of its pure form, in which student_train and student_infer
 * take the places of actor_train and actor_infer. */
static void add_distillation(reader *r, bool is_pure) {
    const mt_role_key *row = mt_role_key_find("roll", "kl_penalty", r->role);
    char *type = path_text(r, "kl_penalty"), *coef = is_pure ? NULL : path_text(r, "opd_kl_coef"), value[400];
    const char *name = is_pure ? "student_train" : "use_opd";
    long long line = line_of_root_key(r, name);
    snprintf(r->key, sizeof r->key, "%s", name);
    add_option(r, line, "distillation-in", "advantages")->is_implied = true;
    if (is_pure) add_option(r, line, "use-task-rewards", "false")->is_implied = true;
    if (is_pure && !is_set(r, "adv-estimator")) // of no use, but that of ROLL's default would train a critic
        add_option(r, line, "adv-estimator", "reinforce")->is_implied = true;
    if (coef) add_option(r, line_of_root_key(r, "opd_kl_coef"), "distillation-loss-coef", coef)->is_implied = true;
    if (type && row && mt_role_key_translate(row, type, value, sizeof value))
        add_option(r, line_of_root_key(r, "kl_penalty"), "distillation-loss-mode", *value ? value : type)->is_implied =
            true;
    *r->key = 0;
    free(type), free(coef);
}

static bool is_true_at(reader *r, const char *path) {
    char *text = path_text(r, path);
    bool is_true = false;
    if (text) (void)mt_parse_bool(text, &is_true);
    free(text);
    return is_true;
}

static int read_document(reader *r) {
    mt_yaml_node *root = r->yaml->root;
    char roles[400];
    if (!root || root->kind != MT_YAML_SECTION)
        return mt_error_set(r->yaml->error, "%s: is no file of roles: it has no sections", r->yaml->path);
    bool is_pure = mt_yaml_get(root, "student_train") || is_true_at(r, "is_pure_opd");
    if (is_pure && strcmp(r->role, "student_train") == 0) r->role = "actor_train";
    if (is_pure && strcmp(r->role, "student_infer") == 0) r->role = "actor_infer";
    r->distills = is_pure || is_true_at(r, "use_opd");
    const mt_role_stage *stage = mt_role_stages;
    while (stage->stage &&
           (strcmp(stage->role, r->role) != 0 || (stage->key && !mt_yaml_get(r->yaml->root, stage->key))))
        stage++;
    r->stage = stage->stage;
    r->config->trains = r->stage && has_training_strategy(r);
    list_roles(r, roles);
    const mt_yaml_node *verl = find_verl(r);
    const char *section = verl == root ? "verl" : verl || is_trinity(r) ? "trinity" : "roll";
    bool has_no_sections = !verl && is_trinity(r); // of roles
    if (has_no_sections) r->has_role = mt_choice_index("actor_train|actor_infer|reference", r->role) >= 0;
    if (is_trinity(r) && verl != root && strcmp(r->role, "actor_train") == 0) stage = trinity_stage(r, stage);
    r->stage = stage->stage;
    if (take_section(r, root, section, 1) != 0) return -1;
    if (r->has_role && r->distills && strcmp(r->role, "actor_train") == 0) add_distillation(r, is_pure);
    if (r->has_role && r->stage) add_stage(r, stage, section);
    if (r->has_role && strcmp(r->role, "actor_infer") == 0) add_defaults(r, section);
    if (r->has_role) return 0;
    if (!*roles)
        return mt_error_set(r->yaml->error, "--role %.80s: %s has no sections of roles", r->role, r->yaml->path);
    return mt_error_set(r->yaml->error, "--role %.80s: %s has the roles %s", r->role, r->yaml->path, roles);
}

int mt_role_config_read(mt_role_config *config, const char *role, mt_yaml *yaml) {
    reader r = {.config = config, .role = role, .yaml = yaml};
    *config = (mt_role_config){0};
    yaml->absent_path = "trainer.trainer_config."; // Trinity-RFT's of verl: keys that it lacks have verl's defaults
    return read_document(&r);
}

bool mt_role_config_detect(char roles[400], mt_yaml *yaml) {
    reader r = {.role = "", .yaml = yaml};
    *roles = 0;
    list_roles(&r, roles);
    return *roles;
}
