/* option_help.c: the option table as text: --help, the printed configuration, a man page, a bash completion. */
#include "option_help.h"

#include "../base/file.h"
#include "megatron_names.h"
#include "option_table.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* The options that most people need, in the order of a run; --help begins with them. */
static const char *const common_options[2][13] = {
    {"config", "hf-config", "load", "data-path", "tokenizer-model", "seq-length", "global-batch-size", "train-iters",
     "lr", "bf16", "tensor-model-parallel-size", "save"},
    {"load", "prompt", "max-new-tokens", "temperature", "top-p", "seed", "bf16", "tensor-model-parallel-size", "score",
     "out"},
};

static const char *const *mt_common_options(mt_program program) {
    return common_options[program == MT_PROGRAM_INFER];
}

static bool mt_option_is_common(const mt_option *row, mt_program program) {
    for (const char *const *name = mt_common_options(program); *name; name++)
        if (strcmp(*name, row->name) == 0) return true;
    return false;
}

static const char *mt_program_name(mt_program program) {
    return program == MT_PROGRAM_INFER ? "infer" : "train";
}

static const char *mt_program_purpose(mt_program program) {
    return program == MT_PROGRAM_INFER ? "runs a GPT-family model" : "trains a GPT-family model";
}

/* ---- --help */

/* Prints words from `column` on, wraps them at column 100 and indents further lines by `indent`. */
static void mt_print_wrapped(FILE *file, const char *text, int column, int indent) {
    enum { WIDTH = 100 };
    while (*text) {
        int length = (int)strcspn(text, " ");
        if (column > indent && column + 1 + length > WIDTH) {
            fprintf(file, "\n%*s", indent, "");
            column = indent;
        } else if (column > indent) {
            fputc(' ', file);
            column++;
        }
        fprintf(file, "%.*s", length, text);
        column += length, text += length;
        text += *text == ' ';
    }
    fputc('\n', file);
}

/* The option's value as it is written after its name: " N", " FILE", or "". */
static void mt_option_value_print(char text[120], const mt_option *row) {
    const char *type = row->type == MT_INT || row->type == MT_REAL ? " N" : row->type == MT_CHOICE ? " NAME" : "";
    if (row->type == MT_OPTIONAL)
        snprintf(text, 120, " [%s]", row->values);
    else if (row->type == MT_CHOICES || row->type == MT_REALS)
        snprintf(text, 120, "%s", row->type == MT_CHOICES ? " NAME ..." : " N ...");
    else if (row->type == MT_STRING || mt_option_is_list(row))
        snprintf(text, 120, " %s%s", row->values, mt_option_is_list(row) ? " ..." : "");
    else
        snprintf(text, 120, "%s", type);
}

/* Help, choices and default. */
static void mt_option_description_print(char *text, size_t room, const mt_option *row) {
    size_t end = (size_t)snprintf(text, room, "%s", row->help);
    if (row->type == MT_CHOICE || row->type == MT_CHOICES) { // "(a, b, c; default: a)"
        end += (size_t)snprintf(text + end, room - end, " (");
        for (const char *at = row->values; *at; at++)
            end += (size_t)snprintf(text + end, room - end, *at == '|' ? ", " : "%c", *at);
        snprintf(text + end, room - end, row->fallback ? "; default: %s)" : ")", row->fallback);
    } else if (row->fallback)
        snprintf(text + end, room - end, " (default: %s)", row->fallback);
}

/* Prints an option: name and value on the left, then its description. */
static void mt_option_help(const mt_option *row, FILE *file) {
    enum { INDENT = 34 };
    char value[120], left[200], text[600];
    mt_option_value_print(value, row);
    mt_option_description_print(text, sizeof text, row);
    snprintf(left, sizeof left, "%c --%s%s", row->own ? '*' : ' ', row->name, value);
    if (strlen(left) > INDENT - 2)
        fprintf(file, "%s\n%*s", left, INDENT, "");
    else
        fprintf(file, "%-*s", INDENT, left);
    mt_print_wrapped(file, text, INDENT, INDENT);
}

static void mt_options_help_all(mt_program program, FILE *file) {
    const char *name = mt_program_name(program);
    fprintf(file, "usage: %s%s [options]; %s\n\nwhat most people need\n", name,
            program == MT_PROGRAM_INFER ? " --load DIR" : "", mt_program_purpose(program));
    for (const char *const *common = mt_common_options(program); *common; common++)
        mt_option_help(mt_option_find(*common, strlen(*common)), file);
    fprintf(file,
            "\n%s --help WORD shows the options whose names or texts have a word; --version prints the version.\n"
            "Options marked * are not Megatron-LM's.\n",
            name);
    const char *group = NULL;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name) group = row->help;
        if (!row->name || !(row->programs & (int)program) || mt_option_is_common(row, program)) continue;
        if (group) fprintf(file, "\n%s\n", group);
        group = NULL;
        mt_option_help(row, file);
    }
}

/* True if `text` has `word`, whatever their case; '_' in `word` equals '-'. */
static bool mt_text_has(const char *text, const char *word) {
    size_t length = strlen(word);
    for (; text && *text; text++) {
        size_t i = 0;
        while (i < length &&
               tolower((unsigned char)text[i]) == (word[i] == '_' ? '-' : tolower((unsigned char)word[i])))
            i++;
        if (i == length) return true;
    }
    return false;
}

/* --help WORD. Returns the number of options that it shows. */
static int mt_options_help_word(mt_program program, const char *word, FILE *file) {
    int count = 0;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || !(row->programs & (int)program)) continue;
        if (!mt_text_has(row->name, word) && !mt_text_has(row->help, word) && !mt_text_has(row->values, word)) continue;
        mt_option_help(row, file);
        count++;
    }
    mt_megatron_name megatron = mt_megatron_name_find(word, strlen(word));
    if (megatron.kind == MT_NAME_ALIAS)
        fprintf(file, "--%s is another name, or form, of --%s\n", word, megatron.text);
    else if (megatron.kind == MT_NAME_ALWAYS)
        fprintf(file, "--%s can only be %s here: %s\n", word, megatron.value, megatron.text);
    else if (megatron.kind == MT_NAME_NAMED)
        fprintf(file, "--%s is named %s here\n", word, megatron.text);
    else if (megatron.kind)
        fprintf(file, "--%s %s (%s)\n", word,
                megatron.kind == MT_NAME_UNSUPPORTED ? "is not supported" : "has no meaning here", megatron.text);
    return count + (megatron.kind != MT_NAME_UNKNOWN);
}

/* ---- man page and completion */

/* Prints text for troff: dashes are the ASCII ones, and no line begins with a request. */
static void mt_troff_print(FILE *file, const char *text) {
    if (*text == '.' || *text == '\'') fputs("\\&", file);
    for (; *text; text++)
        if (*text == '-')
            fputs("\\-", file);
        else if (*text == '\\')
            fputs("\\e", file);
        else
            fputc(*text, file);
}

static void mt_options_man_page(mt_program program, FILE *file) {
    const char *name = mt_program_name(program);
    fprintf(file, ".TH MEGATRON\\-%s 1 \"\" \"megatron.c %s\"\n.SH NAME\nmegatron\\-%s \\- %s\n",
            program == MT_PROGRAM_INFER ? "INFER" : "TRAIN", mt_version(), name, mt_program_purpose(program));
    fprintf(file,
            ".SH SYNOPSIS\n.B megatron\\-%s\n.RI [ options ]\n.PP\n.B mpirun \\-np\n.I N\n.B megatron\\-%s\n"
            ".RI [ options ]\n.SH DESCRIPTION\nOptions have the names of Megatron\\-LM; those marked * are not "
            "Megatron\\-LM's.\nA YAML file of\n.B \\-\\-config\nhas the same names with underscores; the command line "
            "takes precedence. With \\fB\\-\\-role\\fR it is a file of ROLL, verl or Trinity\\-RFT.\n.B "
            "\\-\\-help\n.I WORD\nshows the options whose names or texts have a word.\n"
            ".SH OPTIONS\n",
            name, name);
    const char *group = NULL;
    char text[600];
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name) group = row->help;
        if (!row->name || !(row->programs & (int)program)) continue;
        if (group) {
            fputs(".SS ", file);
            mt_troff_print(file, group);
            fputc('\n', file);
        }
        group = NULL;
        fputs(".TP\n.B ", file);
        mt_option_value_print(text, row);
        fputs("\\-\\-", file);
        mt_troff_print(file, row->name);
        mt_troff_print(file, text);
        fputs(row->own ? " *\n" : "\n", file);
        mt_option_description_print(text, sizeof text, row);
        mt_troff_print(file, text);
        fputc('\n', file);
    }
}

/* True for an option whose value is a file or a folder. */
static bool mt_option_is_path(const mt_option *row) {
    static const char *const kinds[] = {"FILE", "DIR", "PATH", MT_PREFIXES};
    for (size_t i = 0; row->values && i < sizeof kinds / sizeof *kinds; i++)
        if (strncmp(row->values, kinds[i], strlen(kinds[i])) == 0) return true;
    return false;
}

static void mt_options_completion(mt_program program, FILE *file) {
    const char *name = mt_program_name(program);
    fprintf(file,
            "# bash completion of megatron-%s\n_megatron_%s() {\n    local word=${COMP_WORDS[COMP_CWORD]} "
            "before=${COMP_WORDS[COMP_CWORD-1]}\n    case $before in\n",
            name, name);
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name || !(row->programs & (int)program)) continue;
        if (row->type == MT_CHOICE || row->type == MT_CHOICES) {
            fprintf(file, "    --%s) COMPREPLY=($(compgen -W '", row->name);
            for (const char *at = row->values; *at; at++) fputc(*at == '|' ? ' ' : *at, file);
            fprintf(file, "' -- \"$word\")); return ;;\n");
        } else if (mt_option_is_path(row))
            fprintf(file, "    --%s) compopt -o filenames; COMPREPLY=($(compgen -f -- \"$word\")); return ;;\n",
                    row->name);
    }
    fprintf(file, "    esac\n    COMPREPLY=($(compgen -W '--help --version");
    for (const mt_option *row = mt_option_table; row->help; row++)
        if (row->name && row->programs & (int)program) fprintf(file, " --%s", row->name);
    fprintf(file, "' -- \"$word\"))\n}\ncomplete -F _megatron_%s megatron-%s ./%s\n", name, name, name);
}

/* ---- answers that end the program */

/* --help, with the word behind it or NULL. Returns the program's status. */
static int mt_options_answer(mt_program program, const char *word) {
    if (!word) {
        mt_options_help_all(program, stdout);
        return 0;
    }
    if (strcmp(word, "man-page") == 0) { // for the Makefile
        mt_options_man_page(program, stdout);
        return 0;
    }
    if (strcmp(word, "bash-completion") == 0) {
        mt_options_completion(program, stdout);
        return 0;
    }
    if (mt_options_help_word(program, word, stdout) > 0) return 0;
    fprintf(stderr, "no option has '%.100s' in its name or text; --help lists all options\n", word);
    return 1;
}

void mt_options_help(mt_program program, const mt_givens *givens) {
    for (int64_t i = 0; i < givens->count; i++) {
        const mt_given *given = &givens->items[i];
        bool version = strcmp(given->name, "version") == 0 && given->form == MT_GIVEN_WORDS;
        const char *word = given->values.count > 0 ? given->values.items[0] : NULL;
        bool is_empty = given->form == MT_GIVEN_TEXT && !*word; // "--help="
        if (!version && (strcmp(given->name, "help") != 0 || is_empty)) continue;
        if (mt_launch_rank() > 0) exit(0);
        mt_error error;
        bool is_last = i + 2 == givens->count && given->values.count == 0; // "--help --lr", not "--help --lr 1"
        const mt_given *next = is_last ? &givens->items[i + 1] : NULL;
        if (next && next->form == MT_GIVEN_WORDS && next->values.count == 0) word = next->name;
        if (word && strncmp(word, "--", 2) == 0) word += 2; // "--help=--lr"
        int status = 0;
        if (version) printf("%s (megatron.c) %s\n", mt_program_name(program), mt_version());
        if (!version) status = mt_options_answer(program, word);
        if (mt_file_flush_output(&error) != 0) mt_die("%s", error.text);
        exit(status);
    }
}

/* Prints the options that differ from their defaults, with the origin of each value as a comment, if asked. */
static void mt_options_print_rows(const mt_run_options *options, mt_program program, bool has_origins, FILE *file) {
    const char *group = NULL;
    for (const mt_option *row = mt_option_table; row->help; row++) {
        if (!row->name) group = row->help;
        if (!row->name || !(row->programs & (int)program) || mt_option_of(row->offset) != row) continue;
        if (mt_option_is_default(options, row)) continue;
        if (group) fprintf(file, "%s\n", group);
        group = NULL;
        char *text = mt_option_text(options, row), *origin = mt_option_origin_text(options, row);
        const char *slash = strrchr(origin, '/');
        if (has_origins && *origin)
            fprintf(file, "  %-36s %-20s # %s\n", row->name, text, slash ? slash + 1 : origin);
        else
            fprintf(file, "  %-36s %s\n", row->name, text);
        free(text), free(origin);
    }
}

void mt_options_print(const mt_run_options *options, mt_program program, FILE *file) {
    mt_options_print_rows(options, program, false, file);
}

/* ---- the keys of a file of roles */

/* True for an entry of config_keys that is not listed: the default of an absent key, or a second entry of a key, where
 * it has no effect. */
static bool mt_config_key_is_spare(const mt_strings *keys, int64_t i) {
    bool spare = *keys->items[i + 3], absent = strcmp(keys->items[i], "0") == 0;
    for (int64_t j = i; j < i + 4 && spare && !absent; j++)
        spare = j == i + 2 || (i > 0 && strcmp(keys->items[j], keys->items[j - 4]) == 0);
    return spare;
}

/* Says that --reward takes the place of a file's reward classes, which are Python, where no key and no option of the
 * command line chooses the reward. */
static void mt_options_print_reward(const mt_run_options *options, FILE *file) {
    const mt_strings *keys = &options->config_keys;
    const mt_option *row = mt_option_find("reward", strlen("reward"));
    bool is_implied = false;
    for (int64_t i = 0; i < keys->count; i += 4)
        is_implied |= strcmp(keys->items[i + 1], "(absent: reward)") == 0 && !*keys->items[i + 3];
    if (!is_implied) return;
    char *value = mt_option_text(options, row);
    fprintf(file,
            "rewards: --reward %s, as the reward classes of this file are Python, which does not run here; choose "
            "with --reward\n",
            value);
    free(value);
}

void mt_options_print_unused(const mt_run_options *options, FILE *file) {
    const mt_strings *keys = &options->config_keys;
    int64_t used = 0;
    for (int64_t i = 0; i < keys->count; i += 4) used += !*keys->items[i + 3];
    fprintf(file, "%s, role %s: %lld keys set options, which --print-config shows; the others have no effect here:\n",
            options->config, options->role, (long long)used);
    for (int64_t i = 0; i < keys->count; i += 4) {
        const char *reason = keys->items[i + 3];
        bool is_first = *reason && !mt_config_key_is_spare(keys, i);
        for (int64_t j = 0; j < i && is_first; j += 4) is_first = strcmp(keys->items[j + 3], reason) != 0;
        if (!is_first) continue;
        fprintf(file, "  %s", keys->items[i + 1]);
        for (int64_t j = i + 4; j < keys->count; j += 4)
            if (strcmp(keys->items[j + 3], reason) == 0 && !mt_config_key_is_spare(keys, j))
                fprintf(file, ", %s", keys->items[j + 1]);
        fprintf(file, ": %s\n", reason);
    }
    mt_options_print_reward(options, file);
}

int64_t mt_options_printed_ranks(const mt_run_options *o, int64_t world_size) {
    const mt_options *stack = &o->stack;
    const int64_t longest = 1 << 12; // sizes above it are refused later
    int64_t tp = mt_max(mt_min(stack->tensor_model_parallel_size, longest), 1);
    int64_t pp = mt_max(mt_min(stack->pipeline_model_parallel_size, longest), 1);
    int64_t cp = mt_max(mt_min(stack->context_parallel_size, longest), 1);
    int64_t ep = mt_max(mt_min(stack->expert_model_parallel_size, longest), 1);
    int64_t etp = mt_max(mt_min(stack->expert_tensor_parallel_size, longest), 1);
    if (world_size > 1) return world_size;
    bool sized = tp > 1 || pp > 1 || cp > 1 || ep > 1 || etp > 1;
    if (o->config_devices > 0 && (sized || !mt_launched_by_mpi())) return o->config_devices;
    int64_t divisor = ep * etp; // the greatest of this and tp * cp: a stage has a multiple of both
    for (int64_t rest = tp * cp; rest > 0;) {
        int64_t next = divisor % rest;
        divisor = rest, rest = next;
    }
    return tp * pp * cp * (ep * etp / divisor);
}

void mt_options_print_config(const mt_run_options *options, mt_program program, int64_t ranks, const mt_error *error,
                             FILE *file) {
    const mt_strings *keys = &options->config_keys;
    int width = 0;
    for (int64_t i = 0; i < keys->count; i += 4) width = (int)mt_max(width, (int64_t)strlen(keys->items[i + 1]));
    if (options->role) fprintf(file, "%s, role %s: keys and options\n", options->config, options->role);
    for (int64_t i = 0; i < keys->count; i += 4) {
        if (*keys->items[i + 3]) continue;
        const mt_option *row = mt_option_find(keys->items[i + 2], strlen(keys->items[i + 2]));
        char *value = mt_option_text(options, row);
        fprintf(file, "%6s  %-*s  --%s %s\n", keys->items[i], width, keys->items[i + 1], row->name, value);
        free(value);
    }
    if (options->role) fprintf(file, "keys without effect here\n");
    for (int64_t i = 0; i < keys->count; i += 4)
        if (*keys->items[i + 3] && !mt_config_key_is_spare(keys, i))
            fprintf(file, "%6s  %-*s  %s\n", keys->items[i], width, keys->items[i + 1], keys->items[i + 3]);
    if (options->role) mt_options_print_reward(options, file);
    fprintf(file, "options on %lld rank%s\n", (long long)ranks, ranks == 1 ? "" : "s");
    mt_options_print_rows(options, program, true, file);
    if (error) fprintf(file, "these options do not make a run yet: %s\n", error->text);
}
