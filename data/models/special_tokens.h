/* special_tokens.h: what a model's folder says about the begin, the end and the padding of texts and about sampling,
 * and hands on to the folders that are saved from it. Options hold it as text: special_tokens are the keys
 * bos_token_id, eos_token_id and pad_token_id of config.json, and generation_config is the file of that name. */
#ifndef MT_SPECIAL_TOKENS_H
#define MT_SPECIAL_TOKENS_H

#include "../base/file.h"
#include "../options/options.h"

#include <jansson.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Checks the ids of special tokens in a JSON object, that of the file `path`: each is null, a token, or for
 * eos_token_id a list of tokens. */
int mt_special_tokens_check(const json_t *object, const char *path, mt_error *error);

/* Takes the ids that a config.json has, for mt_special_tokens_set. */
void mt_special_tokens_take(mt_run_options *options, const json_t *config);

/* Sets the ids of the folder that the options came from, or else options->bos_token_id and eos_token_id; without
 * `nulls` only ids that name a token. */
void mt_special_tokens_set(json_t *object, const mt_run_options *options, bool nulls);

/* Reads generation_config.json of a folder, if it has one. Errors: no JSON; an id that is none; a setting
 * of sampling of another type. */
int mt_generation_config_read(mt_run_options *options, const char *folder, mt_error *error);

/* Adds the end tokens of the generation_config.json of a folder, an adapter's, if it has one. Errors as above. */
int mt_generation_config_add_ends(mt_run_options *options, const char *folder, mt_error *error);

/* Writes generation_config.json: as it was read, or else the ids of special tokens, if there are any. */
int mt_generation_config_write(const mt_run_options *options, const char *folder, mt_error *error);

/* Adds a token to the end tokens of the generation_config.json that mt_generation_config_write writes, unless it, or
 * config.json where it has none, names that token. */
void mt_generation_config_add_end(mt_run_options *options, int64_t id);

/* Adds a token to the tokens that end a text, unless it is one of them; false if there is no room. */
bool mt_stops_add(mt_stops *stops, int64_t id);

/* The tokens that end a text of the model that options were read from: those of generation_config.json, which may list
 * several; without any there, those of config.json; perhaps none. An error if mt_stops does not hold them all. */
int mt_stops_of_options(mt_stops *stops, const mt_run_options *options, mt_error *error);

/* Prints the end tokens of the model's folder that its vocabulary does not have. */
void mt_stops_warn(const mt_run_options *options, FILE *file);

#ifdef __cplusplus
}
#endif
#endif
