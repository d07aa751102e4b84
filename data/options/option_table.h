/* option_table.h: a row for every option: its name, type, default, range, help, and the options that it needs and
 * excludes. Command line, YAML, --help, the printed configuration and config.json are loops over the rows. */
#ifndef MT_OPTION_TABLE_H
#define MT_OPTION_TABLE_H

#include "options.h"

typedef enum mt_option_type {
    MT_FLAG,     // --swiglu
    MT_NO,       // --disable-bias-linear: clears its field, whose default is true
    MT_INT,      // plain decimals
    MT_REAL,     // decimals, or with an exponent
    MT_STRING,   // one word
    MT_OPTIONAL, // one word, or none, which is "-"
    MT_CHOICE,   // one of a|b|c; the field is an enum of these, in this order
    MT_SET,      // some of a|b|c, separated by blanks or commas; the field has a bit for each, in this order
    MT_CHOICES,  // one or more of a|b|c, each once; the field has their indices in the order that was given
    MT_INTS,     // whole numbers
    MT_REALS,    // numbers; where one is expected, the first one
    MT_LIST,     // one word or more
} mt_option_type;

/* Where a value may come from besides the user. */
typedef enum mt_option_origin {
    MT_OF_RUN,     // nothing else
    MT_OF_MODEL,   // the model's config.json, unless the user gave it
    MT_OF_WEIGHTS, // the same; loaded weights need this value
} mt_option_origin;

enum { MT_TRAIN = MT_PROGRAM_TRAIN, MT_INFER = MT_PROGRAM_INFER, MT_BOTH = MT_PROGRAM_TRAIN | MT_PROGRAM_INFER };

/* A row per option. A row without a name opens a group of --help. */
typedef struct mt_option {
    const char *name; // as on the command line; with underscores in YAML
    mt_option_type type;
    size_t offset; // of the field in mt_run_options; later rows with the same offset are aliases
    int programs;
    mt_option_origin origin;
    const char *fallback; // the default as text; NULL: none, or derived
    const char *values;   // the range of a number; the choices; the kind of a word
    const char *help;
    // Other options, separated by ", ": "save" with a value other than its default, or "device cpu|cuda" with one of
    // these. A rule holds for a value that the user gave; after "any: " for any value but the default, wherever it
    // comes from; after "cudnn|flash: " for these values.
    const char *needs, *excludes;
    bool own; // Megatron-LM has no option of this name
} mt_option;

/* The kind of word of an option that names datasets, or a blend of them. */
#define MT_PREFIXES "PREFIX"

#define MT_AT(field) offsetof(mt_run_options, field)

extern const mt_option mt_option_table[]; // ends with a row without help

/* The first row of a field: aliases share it. */
const mt_option *mt_option_of(size_t offset);

/* The option of this name, with dashes or underscores; NULL if there is none. */
const mt_option *mt_option_find(const char *name, size_t length);

/* True for the option's own name, with dashes or underscores. */
bool mt_option_named(const mt_option *row, const char *name, size_t length);

/* A rule of the columns `needs` and `excludes`, as text "condition: name choices". */
typedef struct mt_option_rule {
    char text[160];
    const char *condition, *choices; // NULL: none
    const mt_option *other;
} mt_option_rule;

/* Takes the next rule of a column; false at its end. */
bool mt_option_next_rule(const char **column, mt_option_rule *rule);

/* The field that a row points at; the choice or the set. */
bool *mt_option_bool(const mt_run_options *options, const mt_option *row);
int64_t *mt_option_int(const mt_run_options *options, const mt_option *row);
double *mt_option_real(const mt_run_options *options, const mt_option *row);
char **mt_option_string(const mt_run_options *options, const mt_option *row);
unsigned *mt_option_choice(const mt_run_options *options, const mt_option *row);

/* True for an option of several words. Empties a list; nothing for other options. */
bool mt_option_is_list(const mt_option *row);
void mt_option_clear(mt_run_options *options, const mt_option *row);

/* Where the value of an option comes from: a line of the file of --config, from 1, or one of these. */
enum {
    MT_ORIGIN_NONE = 0, // the default, a derived value, or set by a program
    MT_ORIGIN_COMMAND_LINE = -1,
    MT_ORIGIN_MODEL = -2,      // config.json
    MT_ORIGIN_CHECKPOINT = -3, // the arguments in a checkpoint of Megatron-LM, or trainer.json
    MT_ORIGIN_ABSENT = -4      // the default that the program of a file of roles has for a key
};
int64_t mt_option_line(const mt_run_options *options, const mt_option *row);
void mt_option_set_origin(mt_run_options *options, const mt_option *row, int64_t origin);

/* The origin as text, to free: "run.yaml:3", "command line", "config.json", "checkpoint"; "" for none. */
char *mt_option_origin_text(const mt_run_options *options, const mt_option *row);

/* Sets an option to its default, as if it was not given. */
void mt_option_reset(mt_run_options *options, const mt_option *row);

/* True if an option has its default. */
bool mt_option_is_default(const mt_run_options *options, const mt_option *row);

/* Replaces a string of the options by a copy of `text`, which may be NULL or the string itself. */
void mt_string_set(char **string, const char *text);

/* Adds a copy of a text to a list; frees a list. */
void mt_strings_add(mt_strings *strings, const char *text);
void mt_strings_free(mt_strings *strings);

/* Reads true or false, or YAML 1.1's yes, no, on and off, in YAML's three cases (true, True, TRUE). False if `text` is
 * none of them. */
bool mt_parse_bool(const char *text, bool *value);

/* Reads a whole number as Python's int: 12, +12, 1_000. False if `text` is none. */
bool mt_parse_int(const char *text, int64_t *value);

/* Sets a value from its text and marks the option as given; `where` names it in messages. Appends to a list. */
int mt_option_set(mt_run_options *options, const mt_option *row, const char *text, const char *where, mt_error *error);

/* The value as text, to free; "" if there is none. */
char *mt_option_text(const mt_run_options *options, const mt_option *row);

/* The option's name with underscores, as in files. */
void mt_option_key(char key[80], const mt_option *row);

/* Copies an option's value. */
void mt_option_copy(mt_run_options *to, const mt_run_options *from, const mt_option *row);

/* True if `value` is in the range of a row, "[low,high]"; ( and ) exclude an end. */
bool mt_option_in_range(const mt_option *row, double value);

/* Checks numbers against their ranges and choices against their lists; values that are not given are skipped. */
int mt_options_check_ranges(const mt_run_options *options, mt_program program, mt_error *error);

/* True for an option that was given with another value than its default. */
bool mt_option_used(const mt_run_options *options, const mt_option *row);

/* True for two options that are forms of one setting, such as --train-samples and --train-iters: they exclude each
 * other unless their values agree, which is checked where both are known. */
bool mt_option_is_form_of(const mt_option *row, const mt_option *other);

/* True if an option has one of the choices "a|b", or, without choices, another value than its default. */
bool mt_option_has(const mt_run_options *options, const mt_option *row, const char *choices);

/* True if the condition of a rule of `row` is met. */
bool mt_option_rule_holds(const mt_run_options *options, const mt_option *row, const mt_option_rule *rule);

/* The fewest digits that read back as the same double. */
void mt_real_print(char text[32], double value);

/* Options that name layers: which layers a number N names, and what a 1 in a list means, differ as in Megatron. */
typedef enum mt_layer_freq_rule {
    MT_EXPERT_LAYERS, // --moe-layer-freq: the first of each N layers; 1: experts
    MT_WINDOW_LAYERS, // --window-attn-skip-freq: all but the last of each N; 1: a window
    MT_ROPE_LAYERS,   // --no-rope-freq: all but the last of each N have RoPE; 1: no RoPE
    MT_LINEAR_LAYERS  // --linear-attention-freq: all but the last of each N; 1: linear attention
} mt_layer_freq_rule;

/* True for an option that names layers; its rule. */
bool mt_option_names_layers(const mt_option *row, mt_layer_freq_rule *rule);

/* A value of such an option as a letter per layer, '1' with (experts, a window, RoPE) and '0' without; to free. NULL
 * with error. A list that may be longer is cut off. */
char *mt_layer_freq_expand(const char *text, mt_layer_freq_rule rule, int64_t num_layers, bool may_be_longer,
                           mt_error *error);

/* The letters as a value of the option, ([0]*3+[1]*58); to free. */
char *mt_layer_freq_print(const char *layers, mt_layer_freq_rule rule);

/* The Levenshtein distance of two names, for "did you mean": '_' in `a` equals '-'; names are cut after 64 letters. */
int mt_edit_distance(const char *a, size_t a_length, const char *b);

/* Sets every option to its default, in a struct that is not in use; frees the strings of a struct. */
void mt_options_default(mt_run_options *options);
void mt_options_free(mt_run_options *options);

/* Makes `to`, which is not in use, an equal value with strings and lists of its own. */
void mt_options_copy(mt_run_options *to, const mt_run_options *from);

/* The index of `text` among the choices "a|b|c", or -1. */
int mt_choice_index(const char *choices, const char *text);

#endif
