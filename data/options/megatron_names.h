/* megatron_names.h: the option names of Megatron-LM (August 2026), and of a few other trainers, that are no row of the
 * option table: each one's answer. */
#ifndef MT_MEGATRON_NAMES_H
#define MT_MEGATRON_NAMES_H

#include <stddef.h>

typedef enum mt_name_kind {
    MT_NAME_UNKNOWN,
    MT_NAME_ALIAS,       // another name, or another form, of the option `text`
    MT_NAME_ALWAYS,      // states a property, `text`, that always holds here: accepts `value` and nothing else
    MT_NAME_IDLE,        // accepted and printed: `text` is why it changes nothing here
    MT_NAME_NAMED,       // refused: the option is named `text` here, and its values may differ
    MT_NAME_NO_MEANING,  // refused: there is nothing here that it could name; `text` is the reason
    MT_NAME_UNSUPPORTED, // refused: `text` is the unsupported feature. A value of false is accepted
} mt_name_kind;

typedef struct mt_megatron_name {
    mt_name_kind kind;
    const char *text;
    // MT_NAME_ALWAYS and MT_NAME_IDLE: the values that are accepted, "a|b"; MT_NAME_IDLE: NULL for all. MT_NAME_ALIAS:
    // NULL takes the option's values; "!" is the opposite of a flag; any other is a flag that gives the option this
    // value, with "?" in front unless it was given.
    const char *value;
    // MT_NAME_ALIAS: values with other names here, "theirs=ours|..."; "theirs=" is the default, and "theirs=!reason" is
    // refused
    const char *values;
} mt_megatron_name;

/* The answer to a name, with dashes or underscores. */
mt_megatron_name mt_megatron_name_find(const char *name, size_t length);

/* The option of an interval or a warm-up as a share of all steps, which transformers' Trainer has as a number of steps
 * below 1; `option` is that of the number of steps. NULL: there is none. */
const char *mt_share_option(const char *option);

#endif
