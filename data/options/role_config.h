/* role_config.h: reads YAML files with roles, as ROLL, verl and Trinity-RFT write them: the effect of each key. */
#ifndef MT_ROLE_CONFIG_H
#define MT_ROLE_CONFIG_H

#include "yaml.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum mt_role_entry_kind {
    MT_ENTRY_OPTION,  // gives the option `name` the values
    MT_ENTRY_FIXED,   // true here in any case: `text` says why
    MT_ENTRY_UNUSED,  // not used here: `text` is whose it is, or why
    MT_ENTRY_REFUSED, // `text` is the reason
    MT_ENTRY_UNKNOWN  // `text` is the key with the nearest name, or ""
} mt_role_entry_kind;

/* A key of the file. */
typedef struct mt_role_entry {
    mt_role_entry_kind kind;
    char *key;        // with its sections: "actor_train.training_args.learning_rate"
    const char *name; // the last word of `key`
    char *option;     // MT_ENTRY_OPTION: its name
    bool is_megatron; // MT_ENTRY_OPTION: one of Megatron-LM's names, with its answers
    bool is_name;     // MT_ENTRY_OPTION: of another role, without values; no error where there is an answer to the name
    bool is_implied;  // MT_ENTRY_OPTION: a further meaning of the key; no error if the program has no such option
    bool is_sequence; // the value is a list
    bool is_derived;  // the value is not that of the file: other keys are in it
    mt_strings values; // one, or those of a list
    char *text, *accepted;
    long long line;
} mt_role_entry;

typedef struct mt_role_config {
    mt_role_entry *entries; // in order of effect: the pipeline's, then the role's
    int64_t count;
    int64_t num_devices; // of the role; 0: not given
    bool trains;         // false: a role that scores or generates, by its name or by its strategy_name
} mt_role_config;

/* Reads the keys that concern `role`: "actor_train", "rewards.NAME". A key that is not known, or whose value is
 * refused, is an entry; errors, in yaml->error, are a role that the file does not have, a reference to nothing or to
 * itself, and a section where a value is expected. Free the config also after an error. */
int mt_role_config_read(mt_role_config *config, const char *role, mt_yaml *yaml);
void mt_role_config_free(mt_role_config *config);

/* True with the names of the roles in `roles`, if a file has any. */
bool mt_role_config_detect(char roles[400], mt_yaml *yaml);

#ifdef __cplusplus
}
#endif
#endif
