/* options.h: the options of a run, as text: command line, YAML, config.json of Hugging Face, --help. */
#ifndef MT_OPTIONS_H
#define MT_OPTIONS_H

#include "../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sets defaults, then reads the --config file that the command line may name, the command line itself, which wins, and
 * with --load or --hf-config the model's shape from config.json. `--help` prints and exits with 0. Nothing is derived
 * or checked across options yet: when it knows the number of ranks, the caller sets vocab_size from its tokenizer if it
 * is still 0 and calls mt_options_finish. Free the options also after an error. */
int mt_options_parse(mt_options *options, mt_program program, int argc, char **argv, mt_error *error);

/* Derives what was not given and checks every rule, before anything is allocated: the only validator. `world_size` is
 * the number of ranks. May be called again after a change. See mt_options_derive. */
int mt_options_finish(mt_options *options, mt_program program, int64_t world_size, mt_error *error);

/* Sets one option by its name ("lr" or "micro_batch_size"), as the command line would: `value` is one word, or the
 * words of a list with blanks between them; "true" or "false" for a flag. */
int mt_options_set(mt_options *options, const char *name, const char *value, mt_error *error);

/* The Levenshtein distance of two names, for "did you mean": '_' in `a` equals '-'; names are cut after 64 letters. */
int mt_edit_distance(const char *a, size_t a_length, const char *b);

/* Sets every option of a struct that holds nothing yet to its default; frees what a struct holds. */
void mt_options_default(mt_options *options);
void mt_options_free(mt_options *options);

/* Reads a YAML text: names with underscores or dashes, flat or in sections, which only group; lists; true and false for
 * flags; null leaves the default. `path` is for messages. Later settings win. */
int mt_options_read_yaml(mt_options *options, mt_program program, const char *text, int64_t bytes, const char *path,
                         mt_error *error);

/* Takes the shape from the text of a Hugging Face config.json, but for options that were given; `path` is for messages.
 */
int mt_options_read_hf_config(mt_options *options, const char *json, int64_t bytes, const char *path, mt_error *error);

/* Takes the model's shape from config.json of the folder options->load, or from the file options->hf_config, but for
 * options that were given. mt_options_parse does this itself. */
int mt_options_read_shape(mt_options *options, mt_error *error);

/* Writes config.json for options->hf_family (finished options), such that transformers (and this program) loads the
 * folder; the family "megatron" is read by this program only. Returns text to free. */
char *mt_options_write_hf_config(const mt_options *options);

/* Prints the options that differ from their defaults, by group. */
void mt_options_print(const mt_options *options, mt_program program, FILE *file);

/* Fails on every rank, naming the first rank and option that differ from rank 0's. Every rank calls it, after
 * mt_options_finish. */
int mt_options_agree(const mt_options *options, const mt_group *world, mt_error *error);

/* ---- the table of options (option_table.c) */

typedef enum mt_option_type {
    MT_FLAG,     // --swiglu
    MT_NO,       // --disable-bias-linear: clears its field, whose default is true
    MT_INT,      // plain decimals
    MT_REAL,     // decimals, or with an exponent
    MT_STRING,   // one word
    MT_OPTIONAL, // one word, or none, which is "-"
    MT_CHOICE,   // one of a|b|c; the field is an enum of these, in this order
    MT_INTS,     // whole numbers
    MT_LIST,     // one word or more
} mt_option_type;

/* Where a value may come from besides the user. */
typedef enum mt_option_origin {
    MT_OF_RUN,     // from nowhere
    MT_OF_MODEL,   // the model's config.json, unless the user gave it
    MT_OF_WEIGHTS, // the same, and weights that are loaded cannot do with another value
} mt_option_origin;

enum { MT_TRAIN = MT_PROGRAM_TRAIN, MT_INFER = MT_PROGRAM_INFER, MT_BOTH = MT_PROGRAM_TRAIN | MT_PROGRAM_INFER };

/* A row per option. A row without a name opens a group, which `help` names. */
typedef struct mt_option {
    const char *name; // as on the command line; with underscores in YAML
    mt_option_type type;
    size_t offset; // of the field in mt_options; an alias is a later row with the same one
    int programs;
    mt_option_origin origin;
    const char *fallback; // the default as the user would write it; NULL: none, or derived
    const char *values;   // numbers: their range; choices: all of them; words: what they are
    const char *help;
} mt_option;

#define MT_AT(field) offsetof(mt_options, field)

enum { MT_NUM_OPTIONS = 199 };
extern const mt_option mt_option_table[];

/* The first row of a field: aliases share it. */
const mt_option *mt_option_of(size_t offset);

/* The field that a row points at. */
bool *mt_option_bool(const mt_options *options, const mt_option *row);
int64_t *mt_option_int(const mt_options *options, const mt_option *row);
double *mt_option_real(const mt_options *options, const mt_option *row);
char **mt_option_string(const mt_options *options, const mt_option *row);
unsigned *mt_option_choice(const mt_options *options, const mt_option *row);

/* Sets a value from its text and marks it as given; `where` names the option for messages. A list gets one more word.
 */
int mt_option_set(mt_options *options, const mt_option *row, const char *text, const char *where, mt_error *error);

/* The value as the user would write it, to free; "" for a value that is not there. */
char *mt_option_text(const mt_options *options, const mt_option *row);

/* The option's name in files: with underscores. */
void mt_option_key(char key[80], const mt_option *row);

/* Copies one option's value between structs. */
void mt_option_copy(mt_options *to, const mt_options *from, const mt_option *row);

/* Whether a number is in the range of the table, "[low,high]" with ( and ) for ends that are not in it. */
bool mt_option_in_range(const mt_option *row, double value);

/* Numbers against the ranges of the table, choices against their lists. What was neither given nor set is skipped. */
int mt_options_check_ranges(const mt_options *options, mt_program program, mt_error *error);

/* The place of `text` in "a|b|c", or -1. */
int mt_choice_index(const char *choices, const char *text);

/* The fewest digits that read back as the same double. */
void mt_real_print(char text[32], double value);

/* Layers with experts as --moe-layer-freq writes them: equal neighbours together, ([0]*3+[1]*58). To free. */
char *mt_layer_freq_print(const char *layers);

/* ---- config.json (hf_config.c) */

/* Copies the model that config.json describes into the options that were not given; with weights, another value that
 * was given for one of their sizes is an error. */
int mt_options_take_shape(mt_options *options, const char *json, int64_t bytes, const char *path, bool has_weights,
                          mt_error *error);

/* The "model_type" of a family; and the family of a name, or MT_HF_UNKNOWN. */
const char *mt_hf_family_name(mt_hf_family family);
mt_hf_family mt_hf_family_find(const char *name);

/* Keeps the family that the shape came from while it fits, else finds one that does. */
void mt_options_derive_family(mt_options *options);

#ifdef __cplusplus
}
#endif
#endif
