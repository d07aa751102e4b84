/* special_tokens.c: ids of special tokens and settings of generation, which a model's folder hands on. */
#include "special_tokens.h"

#include "../base/file.h"
#include "../options/option_table.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const keys[] = {"bos_token_id", "eos_token_id", "pad_token_id"};

enum { BOS, EOS, PAD, NUM_KEYS };

/* True for a token's id; -1 stands for none where older files pad. */
static bool is_token(const json_t *value, int64_t low) {
    int64_t id;
    return mt_json_int(value, low, INT32_MAX, &id);
}

int mt_special_tokens_check(const json_t *object, const char *path, mt_error *error) {
    for (int i = 0; i < NUM_KEYS; i++) {
        const json_t *value = json_object_get(object, keys[i]), *item;
        size_t k;
        bool good = !value || json_is_null(value) || is_token(value, i == PAD ? -1 : 0);
        if (i == EOS && json_is_array(value)) {
            good = true;
            json_array_foreach(value, k, item) good = good && is_token(item, 0);
        }
        if (good) continue;
        char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
        mt_error_set(error, "%s: \"%s\" is %.60s, must be a token%s: a whole number from 0; correct the file", path,
                     keys[i], text ? text : "no JSON", i == EOS ? " or a list of tokens" : "");
        free(text);
        return -1;
    }
    return 0;
}

void mt_special_tokens_take(mt_run_options *options, const json_t *config) {
    json_t *object = json_object();
    for (int i = 0; i < NUM_KEYS; i++) {
        json_t *value = json_object_get(config, keys[i]);
        if (value) json_object_set(object, keys[i], value);
    }
    free(options->special_tokens);
    options->special_tokens = json_object_size(object) > 0 ? json_dumps(object, JSON_COMPACT) : NULL;
    json_decref(object);
}

void mt_special_tokens_set(json_t *object, const mt_run_options *options, bool nulls) {
    const int64_t own[] = {options->bos_token_id, options->eos_token_id, -1};
    json_t *taken = options->special_tokens ? json_loads(options->special_tokens, 0, NULL) : NULL;
    for (int i = 0; i < NUM_KEYS; i++) {
        json_t *value = json_object_get(taken, keys[i]);
        if (value && (nulls || !json_is_null(value)))
            json_object_set(object, keys[i], value);
        else if (!value && own[i] >= 0)
            json_object_set_new(object, keys[i], json_integer(own[i]));
        else if (!value && nulls)
            json_object_set_new(object, keys[i], json_null());
    }
    json_decref(taken);
}

/* The kinds of values of a setting. */
enum {
    TAKES_BOOL = 1,
    TAKES_NUMBER = 2,
    TAKES_WHOLE = 4, // perhaps with a fraction of .0, or too large for 64 bits
    TAKES_TEXT = 8,
    TAKES_TEXTS = 16,   // a list
    TAKES_TOKENS = 32,  // a list
    TAKES_NUMBERS = 64, // a list
    TAKES_LIST = 128,   // of lists
    TAKES_OBJECT = 256,
};

static bool is_whole(const json_t *value) {
    return json_is_number(value) && floor(json_number_value(value)) == json_number_value(value);
}

/* True if a value is of a kind. */
static bool is_of_kinds(const json_t *value, int kinds) {
    const json_t *item;
    size_t i;
    bool texts = kinds & TAKES_TEXTS, tokens = kinds & TAKES_TOKENS, numbers = kinds & TAKES_NUMBERS,
         lists = kinds & TAKES_LIST;
    json_array_foreach(value, i, item) {
        texts = texts && json_is_string(item);
        tokens = tokens && is_whole(item);
        numbers = numbers && json_is_number(item);
        lists = lists && json_is_array(item);
    }
    if (json_is_array(value)) return texts || tokens || numbers || lists;
    return (kinds & TAKES_BOOL && json_is_boolean(value)) || (kinds & TAKES_NUMBER && json_is_number(value)) ||
           (kinds & TAKES_WHOLE && is_whole(value)) || (kinds & TAKES_TEXT && json_is_string(value)) ||
           (kinds & TAKES_OBJECT && json_is_object(value));
}

/* Settings of generation, which other programs read in the folders that are saved: fields of transformers'
 * GenerationConfig (5.24), each with a value of its kind, or null. */
static int check_settings(const json_t *object, const char *path, mt_error *error) {
    static const struct {
        int kinds;
        const char *wanted, *keys;
    } settings[] = {
        {TAKES_BOOL, "true or false",
         "do_sample|use_cache|use_mtp|renormalize_logits|remove_invalid_values|token_healing|output_attentions|"
         "output_hidden_states|output_scores|output_logits|return_dict_in_generate|is_assistant|disable_compile|"
         "low_memory"},
        {TAKES_BOOL | TAKES_TEXT, "true, false or a text", "early_stopping"},
        {TAKES_NUMBER, "a number",
         "temperature|top_p|min_p|top_h|typical_p|epsilon_cutoff|eta_cutoff|repetition_penalty|"
         "encoder_repetition_penalty|length_penalty|guidance_scale|max_time|penalty_alpha|diversity_penalty|"
         "assistant_confidence_threshold|assistant_ensemble_weight"},
        {TAKES_WHOLE, "a whole number",
         "top_k|max_length|max_new_tokens|min_length|min_new_tokens|num_beams|num_beam_groups|num_return_sequences|"
         "no_repeat_ngram_size|encoder_no_repeat_ngram_size|max_cache_len|num_assistant_tokens|"
         "prompt_lookup_num_tokens|max_matching_ngram_size|assistant_early_exit|assistant_lookbehind|"
         "target_lookbehind|prefill_chunk_size|forced_bos_token_id"},
        {TAKES_TEXT, "a text", "cache_implementation|num_assistant_tokens_schedule|speculation_type"},
        {TAKES_TEXT | TAKES_TEXTS, "a text or a list of texts", "stop_strings"},
        {TAKES_TOKENS, "a list of tokens", "suppress_tokens|begin_suppress_tokens"},
        {TAKES_WHOLE | TAKES_TOKENS, "a token or a list of tokens", "forced_eos_token_id|decoder_start_token_id"},
        {TAKES_NUMBERS, "two numbers", "exponential_decay_length_penalty"},
        {TAKES_LIST, "a list of lists", "bad_words_ids|force_words_ids"},
        {TAKES_LIST | TAKES_OBJECT, "an object or a list of pairs", "sequence_bias"},
        {TAKES_TEXT | TAKES_TOKENS, "a text or a list of layers", "dola_layers"},
        {TAKES_OBJECT, "an object", "watermarking_config|cache_config|compile_config"},
    };
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        const char *key;
        json_t *value;
        json_object_foreach((json_t *)object, key, value) {
            if (json_is_null(value) || mt_choice_index(settings[i].keys, key) < 0) continue;
            if (is_of_kinds(value, settings[i].kinds)) continue;
            char *text = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY);
            mt_error_set(error, "%s: \"%s\" must be %s, not %.60s; correct the file", path, key, settings[i].wanted,
                         text ? text : "this");
            free(text);
            return -1;
        }
    }
    return 0;
}

int mt_generation_config_read(mt_run_options *options, const char *folder, mt_error *error) {
    int64_t bytes;
    free(options->generation_config);
    options->generation_config = NULL;
    if (mt_link_check(folder, "generation_config.json", error) != 0) return -1;
    if (!mt_folder_has(folder, "generation_config.json")) return 0;
    char *path = mt_path_join(folder, "generation_config.json");
    char *text = mt_file_read(path, 100000000, &bytes, error);
    json_t *json = text ? mt_json_parse(text, bytes, JSON_REJECT_DUPLICATES, path, error) : NULL;
    int status = json ? mt_special_tokens_check(json, path, error) : -1;
    if (status == 0) status = check_settings(json, path, error);
    json_decref(json);
    free(path);
    if (status == 0)
        options->generation_config = text;
    else
        free(text);
    return status;
}

int mt_generation_config_write(const mt_run_options *options, const char *folder, mt_error *error) {
    json_t *json = json_object();
    mt_special_tokens_set(json, options, false);
    char *text = options->generation_config   ? mt_strdup(options->generation_config)
                 : json_object_size(json) > 0 ? mt_json_print(json)
                                              : NULL;
    char *path = mt_path_join(folder, "generation_config.json");
    int status = text ? mt_file_write(path, text, (int64_t)strlen(text), NULL, error) : 0;
    json_decref(json);
    free(text), free(path);
    return status;
}

void mt_generation_config_add_end(mt_run_options *options, int64_t id) {
    mt_stops stops;
    mt_error error; // of an "eos_token_id" that is too long, which has no room
    if (id < 0 || mt_stops_of_options(&stops, options, &error) != 0) return;
    for (int64_t i = 0; i < stops.count; i++)
        if (stops.ids[i] == id) return;
    if (!mt_stops_add(&stops, id)) return;
    const char *text = options->generation_config;
    json_t *json = text ? mt_json_parse(text, (int64_t)strlen(text), 0, NULL, &error) : json_object();
    json_t *ends = json_array();
    if (!text) mt_special_tokens_set(json, options, false);
    for (int64_t i = 0; i < stops.count; i++) json_array_append_new(ends, json_integer(stops.ids[i]));
    json_object_set_new(json, keys[EOS], ends);
    free(options->generation_config);
    options->generation_config = mt_json_print(json);
    json_decref(json);
}

bool mt_stops_add(mt_stops *stops, int64_t id) {
    for (int64_t i = 0; i < stops->count; i++)
        if (stops->ids[i] == id) return true;
    if (stops->count == MT_MAX_STOPS) return false;
    stops->ids[stops->count++] = (int32_t)id;
    return true;
}

/* Adds the end tokens of an object that was checked. */
static bool add_ends(mt_stops *stops, const json_t *object) {
    const json_t *ends = json_object_get(object, keys[EOS]), *item;
    size_t i;
    bool fits = true;
    if (json_is_integer(ends)) fits = mt_stops_add(stops, json_integer_value(ends));
    json_array_foreach(ends, i, item) fits = fits && mt_stops_add(stops, json_integer_value(item));
    return fits;
}

int mt_generation_config_add_ends(mt_run_options *options, const char *folder, mt_error *error) {
    mt_stops stops = {0};
    char *base = options->generation_config;
    options->generation_config = NULL;
    int status = mt_generation_config_read(options, folder, error);
    char *own = options->generation_config;
    options->generation_config = base;
    json_t *json = own ? mt_json_parse(own, (int64_t)strlen(own), 0, folder, error) : NULL;
    if (status == 0 && json && !add_ends(&stops, json))
        status = mt_error_set(error, "%s/generation_config.json: more than %d tokens end a text", folder, MT_MAX_STOPS);
    for (int64_t i = 0; i < stops.count && status == 0; i++) mt_generation_config_add_end(options, stops.ids[i]);
    json_decref(json);
    free(own);
    return status;
}

void mt_stops_warn(const mt_run_options *o, FILE *file) {
    mt_stops stops;
    mt_error error; // reported where the list is needed
    bool is_known = o->generation_config || o->special_tokens;
    if (!is_known || o->stack.vocab_size == 0 || mt_stops_of_options(&stops, o, &error) != 0) return;
    for (int64_t i = 0; i < stops.count; i++)
        if (stops.ids[i] >= o->stack.vocab_size)
            fprintf(file,
                    "\"eos_token_id\" of the model's folder has %lld, and the model's last token is %lld: it "
                    "ends no text\n",
                    (long long)stops.ids[i], (long long)o->stack.vocab_size - 1);
}

int mt_stops_of_options(mt_stops *stops, const mt_run_options *o, mt_error *error) {
    mt_error ignored; // the text was read before
    json_t *json = o->generation_config
                       ? mt_json_parse(o->generation_config, (int64_t)strlen(o->generation_config), 0, NULL, &ignored)
                       : NULL;
    *stops = (mt_stops){.count = 0};
    bool fits = add_ends(stops, json);
    json_decref(json);
    if (stops->count == 0) {
        json = json_object();
        mt_special_tokens_set(json, o, false);
        fits = add_ends(stops, json);
        json_decref(json);
    }
    if (fits) return 0;
    return mt_error_set(error, "--load %s: \"eos_token_id\" lists more than %d tokens; shorten the list", o->load,
                        (int)MT_MAX_STOPS);
}
