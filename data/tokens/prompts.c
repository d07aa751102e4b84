/* prompts.c: prompts as tokens or text, and the token that begins them. */
#include "prompts.h"

#include "../base/file.h"
#include "tokenizer_json.h"
#include "tokenizer_vocab.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Checks prompt `id` for a sequence of at most `context` tokens. */
static int mt_prompt_check(int64_t id, const int32_t *prompt, int64_t num_prompt, int64_t context, const mt_options *o,
                           mt_error *error) {
    long long number = id + 1;
    if (num_prompt <= 0) return mt_error_set(error, "prompt %lld is empty; give it at least one token", number);
    if (num_prompt >= context)
        return mt_error_set(error,
                            "prompt %lld has %lld tokens, which leaves no room for a new one in a context of %lld; "
                            "shorten it",
                            number, (long long)num_prompt, (long long)context);
    for (int64_t i = 0; i < num_prompt; i++)
        if (prompt[i] < 0 || prompt[i] >= o->vocab_size)
            return mt_error_set(error,
                                "prompt %lld: token %d is outside the model's vocabulary of %lld; take the model's own "
                                "tokenizer",
                                number, prompt[i], (long long)o->vocab_size);
    return 0;
}

int mt_sequence_begin(mt_sequence *sequence, int64_t id, const int32_t *prompt, int64_t num_prompt, int64_t context,
                      int64_t max_new_tokens, const mt_options *o, mt_error *error) {
    *sequence = (mt_sequence){.slot = -1};
    if (mt_prompt_check(id, prompt, num_prompt, context, o, error) != 0) return -1;
    int64_t new_tokens = mt_min(max_new_tokens, context - num_prompt);
    *sequence = (mt_sequence){.id = id, .num_prompt = num_prompt, .num_tokens = num_prompt, .slot = -1};
    sequence->max_tokens = num_prompt + new_tokens;
    sequence->finish = new_tokens == 0 ? MT_FINISH_LENGTH : MT_UNFINISHED;
    sequence->tokens = mt_malloc(sequence->max_tokens * 4);
    sequence->logps = mt_malloc(mt_max(new_tokens, 1) * 2 * (int64_t)sizeof *sequence->logps);
    sequence->sampled_logps = sequence->logps + new_tokens;
    memcpy(sequence->tokens, prompt, (size_t)(num_prompt * 4));
    return 0;
}

int mt_sequence_begin_mapping(mt_sequence *sequence, int64_t id, const int32_t *inputs, int64_t num_inputs,
                              int64_t context, int64_t max_new_tokens, const mt_options *o, mt_error *error) {
    static const int32_t start = 0;
    *sequence = (mt_sequence){.slot = -1};
    if (mt_prompt_check(id, inputs, num_inputs, context + 1, o, error) != 0) return -1;
    if (mt_sequence_begin(sequence, id, &start, 1, context, max_new_tokens, o, error) != 0) return -1;
    sequence->inputs = memcpy(mt_malloc(num_inputs * 4), inputs, (size_t)num_inputs * 4);
    sequence->num_inputs = num_inputs;
    return 0;
}

void mt_sequence_end(mt_sequence *sequence) {
    free(sequence->tokens), free(sequence->inputs);
    free(sequence->logps), free(sequence->routes);
    *sequence = (mt_sequence){.slot = -1};
}

int mt_sequence_parse(mt_sequence *sequence, int64_t id, const char *text, int64_t context, int64_t max_new_tokens,
                      const mt_options *options, mt_error *error) {
    int32_t *ids = mt_malloc((int64_t)strlen(text) * 4 + 4);
    int64_t count = 0;
    int status = 0;
    for (const char *from = text; from && status == 0;) {
        char *end;
        errno = 0;
        long long token = strtoll(from, &end, 10);
        if (end == from || errno != 0 || token < 0 || token > INT32_MAX || (*end != ',' && *end != '\0'))
            status = mt_error_set(error, "\"%.20s\" is no token id; give whole numbers with commas between them", from);
        ids[count++] = (int32_t)token;
        from = *end ? end + 1 : NULL;
    }
    bool encodes = options->decoder_num_layers > 0;
    if (status == 0)
        status = (encodes ? mt_sequence_begin_mapping : mt_sequence_begin)(sequence, id, ids, count, context,
                                                                           max_new_tokens, options, error);
    free(ids);
    return status;
}

/* Reads a JSON object; *json is NULL where there is no such file. */
static int read_optional(json_t **json, const char *path, mt_error *error) {
    bool exists = access(path, F_OK) == 0;
    *json = exists ? mt_json_read(path, error) : NULL;
    return exists && !*json ? -1 : 0;
}

/* True if this post-processor of tokenizer.json puts a special token before a text (Llama 3: yes, GPT-2: no). */
static bool adds_bos(const json_t *processor) {
    json_t *item, *single = json_object_get(processor, "single");
    size_t i;
    if (json_object_get(json_array_get(single, 0), "SpecialToken") || json_object_get(processor, "cls")) return true;
    bool found = false;
    json_array_foreach(json_object_get(processor, "processors"), i, item) found |= adds_bos(item);
    return found;
}

/* Adds a token of a frame; -1: no token, or too many. */
static int push_token(mt_ids *ids, const json_t *id, mt_error *error) {
    enum { MOST = 64 };
    int64_t value;
    if (!mt_json_int(id, 0, INT32_MAX, &value))
        return mt_error_set(error, "\"post_processor\" has a token without an id; get the file again");
    if (ids->count == MOST)
        return mt_error_set(error, "\"post_processor\" puts more than %d tokens around a text; get the file again",
                            (int)MOST);
    mt_ids_push(ids, (int32_t)value);
    return 0;
}

/* The ids of an item of a template: a special token has those of the template's table. */
static int push_special(mt_ids *ids, const json_t *processor, const json_t *item, mt_error *error) {
    const char *name = json_string_value(json_object_get(json_object_get(item, "SpecialToken"), "id"));
    const json_t *table = json_object_get(processor, "special_tokens"),
                 *entry = name ? json_object_get(table, name) : NULL, *list = json_object_get(entry, "ids");
    json_t *id;
    size_t i;
    if (!json_is_array(list))
        return mt_error_set(error, "\"post_processor\": \"special_tokens\" has no ids of \"%.60s\"; get the file again",
                            name ? name : "a nameless token");
    json_array_foreach(list, i, id) if (push_token(ids, id, error) != 0) return -1;
    return 0;
}

/* Adds the tokens that a post-processor puts around a single text. The last of a sequence stands outermost. */
static int read_frame(mt_text_frame *frame, const json_t *processor, mt_error *error) {
    json_t *item;
    size_t i;
    bool behind = false;
    mt_ids before = {0};
    const json_t *first = json_object_get(processor, "cls"), *last = json_object_get(processor, "sep"); // Bert, Roberta
    int status = 0;
    json_array_foreach(json_object_get(processor, "single"), i, item) {
        if (json_object_get(item, "Sequence"))
            behind = true;
        else if (status == 0)
            status = push_special(behind ? &frame->after : &before, processor, item, error);
    }
    if (first && status == 0) status = push_token(&before, json_array_get(first, 1), error);
    if (last && status == 0) status = push_token(&frame->after, json_array_get(last, 1), error);
    for (int64_t k = 0; k < frame->before.count; k++) mt_ids_push(&before, frame->before.data[k]);
    free(frame->before.data);
    frame->before = before;
    json_array_foreach(json_object_get(processor, "processors"), i, item) {
        if (status == 0) status = read_frame(frame, item, error);
    }
    return status;
}

int mt_text_frame_read(mt_text_frame *frame, const char *path, const mt_tokenizer *tokenizer, mt_error *error) {
    bool begins;
    struct stat status;
    bool is_file = stat(path, &status) == 0 && S_ISREG(status.st_mode);
    char *inside = mt_path_join(path, "tokenizer.json");
    const char *json_path = is_file ? path : inside;
    json_t *tokenizer_json = NULL;
    *frame = (mt_text_frame){0};
    int result = mt_prompt_begins_with_bos(path, &begins, error);
    if (result == 0 && mt_text_ends_with(json_path, ".json")) result = read_optional(&tokenizer_json, json_path, error);
    mt_error why;
    if (result == 0 && read_frame(frame, json_object_get(tokenizer_json, "post_processor"), &why) != 0)
        result = mt_error_set(error, "%s: %s", json_path, why.text);
    if (!begins) frame->before.count = 0; // add_bos_token of tokenizer_config.json
    if (result == 0 && begins && frame->before.count == 0 && mt_tokenizer_bos(tokenizer) >= 0)
        mt_ids_push(&frame->before, mt_tokenizer_bos(tokenizer));
    json_decref(tokenizer_json);
    free(inside);
    return result;
}

int mt_prompt_begins_with_bos(const char *path, bool *begins, mt_error *error) {
    char config_path[4096], json_path[4096], model_path[4096];
    struct stat status;
    json_t *config, *tokenizer;
    bool is_file = stat(path, &status) == 0 && S_ISREG(status.st_mode);
    int folder = (int)strlen(path); // length of the folder's part of the path
    while (is_file && folder > 0 && path[folder - 1] != '/') folder--;
    snprintf(config_path, sizeof config_path, "%.*s%stokenizer_config.json", folder, path, is_file ? "" : "/");
    snprintf(json_path, sizeof json_path, "%s%s", path, is_file ? "" : "/tokenizer.json");
    snprintf(model_path, sizeof model_path, "%s%s", path, is_file ? "" : "/tokenizer.model");

    if (read_optional(&config, config_path, error) != 0) return -1;
    if (mt_tokenizer_config_check(config, config_path, error) != 0) {
        json_decref(config);
        return -1;
    }
    json_t *add_bos = json_object_get(config, "add_bos_token");
    bool decides = json_is_boolean(add_bos);
    *begins = json_is_true(add_bos);
    json_decref(config);
    if (decides) return 0;
    if (mt_text_ends_with(json_path, ".json") && access(json_path, F_OK) == 0) {
        if (read_optional(&tokenizer, json_path, error) != 0) return -1;
        *begins = adds_bos(json_object_get(tokenizer, "post_processor"));
        json_decref(tokenizer);
    } else {
        *begins = mt_text_ends_with(model_path, ".model") && access(model_path, F_OK) == 0;
    }
    return 0;
}
