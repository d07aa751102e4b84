/* inference.c: start and end of a run of infer, and the sources of its prompts. */
#include "inference.h"

#include "../base/file.h"
#include "../base/host_memory.h"
#include "../base/watchdog.h"
#include "../tokens/prompts.h"
#include "../models/special_tokens.h"
#include "../tokens/tokenizer_encode.h"
#include "../options/option_agree.h"
#include "../options/option_finish.h"
#include "../options/option_help.h"
#include "../options/option_table.h"
#include "../options/option_warn.h"
#include "../checkpoint/adapter.h"
#include "../checkpoint/checkpoint_buckets.h"
#include "../checkpoint/checkpoint_folder.h"
#include "../checkpoint/checkpoint_load.h"
#include "../checkpoint/run_options.h"
#include "../report/report.h"
#include "launch.h"
#include "picture_prompts.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NOTHING_YET = -2, FAILED = -3 }; // instead of a line's bytes

void mt_inference_check(mt_inference *r, int status, mt_error *error) {
    mt_report_refusal(&r->grid, &r->options, status, error);
}

/* ---- tokenizer and model */

void mt_inference_open_tokenizer(mt_inference *r) {
    const mt_run_options *o = &r->options;
    mt_error error;
    bool begins;
    r->bos = -1;
    if (o->prompt_tokens && o->print_tokens && o->stop.count == 0) return;
    int status = o->tokenizer_type ? mt_options_open_tokenizer(&r->tokenizer, o, &error)
                                   : mt_tokenizer_open_folder(&r->tokenizer, r->tokenizer_folder, &error);
    if (status != 0 && o->score && !o->tokenizer_type) { // the lines may be tokens
        r->tokenizer = NULL, r->no_tokenizer = error;
        return;
    }
    if (status != 0) {
        mt_error why = error;
        mt_error_set(&error, "%s; without a tokenizer: --prompt-tokens 1,2,3 --print-tokens", why.text);
    }
    mt_inference_check(r, status, &error);
    r->tokenizer_path = o->tokenizer_model ? o->tokenizer_model : r->tokenizer_folder;
    mt_inference_check(r, mt_prompt_begins_with_bos(r->tokenizer_path, &begins, &error), &error);
    mt_inference_check(r, mt_inference_open_pictures(r, &error), &error);
    if (begins && o->bos_token_id >= 0) r->bos = mt_tokenizer_bos(r->tokenizer);
}

void mt_inference_open_model(mt_inference *r, mt_model_plan *plan) {
    mt_error error;
    mt_run_state state = {0};
    const mt_ops *ops = mt_backend_open(r->options.device, &r->grid, &error);
    if (ops) mt_report_backend(&r->grid);
    if (ops && ops->limits.one_attention) mt_options_drop_attention_backend(&r->options);
    if (ops == &mt_cpu_ops && r->is_first) mt_options_warn_cpu(&r->options, MT_PROGRAM_INFER, stderr);
    plan->host_memory = mt_host_memory_available("");
    int status = r->is_first ? mt_checkpoint_check(&r->options, r->options.load, &error) : 0;
    mt_inference_check(r, status, &error);
    mt_inference_check(r, ops ? mt_model_create(&r->model, &r->options.stack, &r->grid, ops, plan, &error) : -1,
                       &error);
    mt_inference_check(r, mt_checkpoint_load(r->model, &r->options, &state, r->options.load, &error), &error);
    mt_watch_enter(MT_WATCH_STEP);
}

/* The template's end of a turn ends responses to conversations: those of --chat, or lines of --prompts. */
static int add_turn_end(const mt_inference *r, mt_stops *stops, mt_error *error) {
    const mt_run_options *o = &r->options;
    mt_chat *own = NULL;
    if (!r->chat && o->prompts && mt_chat_open(&own, o->chat_template, r->tokenizer, r->tokenizer_path, error) != 0)
        return -1;
    mt_chat *chat = r->chat ? r->chat : own;
    int status = own ? mt_chat_set_variables(own, o->chat_template_kwargs, error) : 0;
    if (status == 0 && chat) status = mt_chat_prepare(chat, error);
    int32_t end = chat && status == 0 ? mt_chat_end(chat) : -1;
    mt_chat_close(own);
    if (status != 0) return -1;
    if (end < 0 || mt_stops_add(stops, end)) return 0;
    return mt_error_set(error, "%s: \"eos_token_id\" leaves no room for the end of a turn; shorten the list",
                        r->folder);
}

void mt_inference_open_generator(mt_inference *r, int64_t prompts, int64_t max_tokens, int64_t prompt_tokens) {
    const mt_run_options *o = &r->options;
    mt_sampling sampling = {.temperature = o->stack.temperature, .top_p = o->top_p, .top_k = o->top_k};
    mt_model_plan plan = {.max_tokens = mt_min(prompt_tokens, MT_PREFILL_TOKENS)};
    mt_stops stops;
    mt_error error;
    int64_t replicas = r->grid.data.size, each = (prompts + replicas - 1) / replicas * o->num_return_sequences;
    sampling.min_p = o->min_p, sampling.repetition_penalty = o->repetition_penalty;
    sampling.seed = (uint64_t)o->stack.seed, sampling.logprobs = o->out != NULL;
    mt_inference_check(r, mt_stops_of_options(&stops, o, &error), &error);
    mt_inference_check(r, add_turn_end(r, &stops, &error), &error);
    if (stops.count == 0 && r->tokenizer) stops = (mt_stops){.ids = {mt_tokenizer_eod(r->tokenizer)}, .count = 1};
    if (o->stop.count > 0) stops.ends_text = mt_responses_end, stops.context = &r->responses;
    plan.page_rows = o->inference_dynamic_batching_block_size, plan.max_inputs = r->max_inputs;
    plan.num_drafts = o->num_speculative_tokens;
    mt_inference_plan_pictures(r, &plan);
    mt_plan_generation(&plan, mt_min(each, o->inference_max_requests), max_tokens, o->kv_cache_tokens);
    mt_inference_open_model(r, &plan);
    if (r->is_first) mt_report_inference(r->model, &r->options, r->context, stderr);
    r->generator = mt_generator_create(r->model, &sampling, &stops);
}

/* ---- prompts */

int mt_inference_begin_text(const mt_inference *r, mt_sequence *sequence, int64_t id, const char *text, int64_t bytes,
                            mt_error *error) {
    mt_ids ids = {mt_malloc(4), 0, 1};
    if (r->bos >= 0) ids.data[ids.count++] = r->bos;
    bool encodes = r->options.stack.decoder_num_layers > 0;
    int status = mt_tokenizer_encode(r->tokenizer, text, bytes, &ids, error);
    if (status == 0 && encodes) mt_ids_push(&ids, mt_tokenizer_eod(r->tokenizer)); // as in training
    if (status == 0)
        status = (encodes ? mt_sequence_begin_mapping : mt_sequence_begin)(
            sequence, id, ids.data, ids.count, r->context, r->options.max_new_tokens, &r->options.stack, error);
    free(ids.data);
    return status;
}

mt_samples mt_inference_read_prompts(mt_inference *r) {
    char *path = r->options.prompts;
    const char *name = "prompts";
    mt_samples prompts;
    mt_error error;
    mt_sft_config config = {.paths = {1, &path}, .tokenizer_path = r->tokenizer_path, .prompts = true};
    config.chat_template_kwargs = r->options.chat_template_kwargs;
    config.chat_template = r->options.chat_template, config.vocab_size = r->options.stack.vocab_size;
    config.seq_length = r->context - 1, config.refuses_long = true; // a line of results for each line
    config.images = r->takes_pictures ? &r->reader : NULL;
    mt_inference_check(r, mt_samples_read(&prompts, &config, r->tokenizer, &error), &error);
    uint64_t print = mt_samples_fingerprint(&prompts);
    mt_inference_check(r, mt_fingerprints_agree(&print, &name, 1, &r->grid.world, &error), &error);
    return prompts;
}

/* Begins a sequence from tokens and their pictures, which are freed. */
static int begin_pictures(mt_inference *r, mt_sequence *sequence, int64_t id, mt_ids *ids, mt_images *images,
                          mt_error *error) {
    int status = mt_sequence_begin(sequence, id, ids->data, ids->count, r->context, r->options.max_new_tokens,
                                   &r->options.stack, error);
    if (status == 0 && mt_inference_attach(r, sequence, images, error) != 0) {
        mt_sequence_end(sequence);
        status = -1;
    }
    mt_images_cut(images, 0);
    free(ids->data);
    return status;
}

/* A prompt as a user's message with the pictures of --image. */
static int begin_shown(mt_inference *r, mt_sequence *sequence, int64_t id, const char *text, mt_error *error) {
    mt_ids ids = {0};
    mt_images images = {0};
    if (mt_inference_encode_shown(r, text, &ids, &images, error) == 0)
        return begin_pictures(r, sequence, id, &ids, &images, error);
    free(ids.data);
    return -1;
}

int mt_inference_begin_prompt(mt_inference *r, const mt_samples *prompts, int64_t i, mt_sequence *sequence, int64_t id,
                              mt_error *error) {
    const mt_run_options *o = &r->options;
    if (o->image.count > 0) return begin_shown(r, sequence, id, o->prompt.items[i], error);
    if (o->prompt_tokens)
        return mt_sequence_parse(sequence, id, o->prompt_tokens, r->context, o->max_new_tokens, &o->stack, error);
    if (o->prompt.count > 0)
        return mt_inference_begin_text(r, sequence, id, o->prompt.items[i], (int64_t)strlen(o->prompt.items[i]), error);
    int64_t first = prompts->offsets[i], tokens = prompts->offsets[i + 1] - first;
    if (mt_sequence_begin(sequence, id, prompts->tokens + first, tokens, r->context, o->max_new_tokens, &o->stack,
                          error) != 0)
        return -1;
    return prompts->image_offsets ? mt_inference_attach_line(r, sequence, prompts, i, error) : 0;
}

int mt_inference_begin_sample(const mt_inference *r, const mt_sequence *first, mt_sequence *sequence, int64_t id,
                              mt_error *error) {
    const mt_run_options *o = &r->options;
    bool encodes = o->stack.decoder_num_layers > 0;
    int status = encodes ? mt_sequence_begin_mapping(sequence, id, first->inputs, first->num_inputs, r->context,
                                                     o->max_new_tokens, &o->stack, error)
                         : mt_sequence_begin(sequence, id, first->tokens, first->num_prompt, r->context,
                                             o->max_new_tokens, &o->stack, error);
    sequence->images = first->images;
    return status;
}

/* ---- a conversation */

void mt_inference_open_chat(mt_inference *r) {
    const mt_run_options *o = &r->options;
    mt_error error;
    mt_inference_check(r, mt_chat_open(&r->chat, o->chat_template, r->tokenizer, r->tokenizer_path, &error), &error);
    mt_inference_check(r, mt_chat_set_variables(r->chat, o->chat_template_kwargs, &error), &error);
    if (o->system_prompt)
        mt_conversation_add(&r->conversation, "system", o->system_prompt, (int64_t)strlen(o->system_prompt));
    for (int64_t i = 0; i < o->image.count && o->chat; i++) {
        int status = mt_inference_show(r, o->image.items[i], &error);
        mt_inference_check(r, status, &error);
    }
}

/* Begins the response to the conversation as sequence `id`. The generator's cache has the turns before it. */
static int begin_response(mt_inference *r, mt_sequence *sequence, int64_t id, mt_error *error) {
    mt_ids ids = {0};
    mt_images images = {0};
    if (mt_inference_encode_talk(r, &ids, &images, error) == 0)
        return begin_pictures(r, sequence, id, &ids, &images, error);
    free(ids.data);
    return -1;
}

int mt_inference_begin_turn(mt_inference *r, mt_sequence *sequence, int64_t id, const char *line, int64_t bytes,
                            mt_error *error) {
    mt_conversation *c = &r->conversation;
    int64_t first = r->options.system_prompt != NULL;
    mt_inference_give_shown(r, c->count);
    mt_conversation_add(c, "user", line, bytes);
    r->has_many_pictures = false;
    int status = begin_response(r, sequence, id, error);
    bool too_many = r->has_many_pictures; // why it no longer fits
    if (status != 0 && c->count > first + 1) {
        mt_inference_move_shown(r, c->count - 1, first);
        mt_conversation_cut(c, first);
        mt_conversation_add(c, "user", line, bytes);
        status = begin_response(r, sequence, id, error);
        if (status == 0 && r->is_first)
            fprintf(stderr,
                    too_many ? "note: the pictures have more than --max-image-tokens %lld; the conversation starts "
                               "again\n"
                             : "note: the context of %lld tokens is full; the conversation starts again\n",
                    (long long)(too_many ? r->options.max_image_tokens : r->context));
    }
    if (status != 0) mt_inference_cut_shown(r, c->count - 1);
    if (status != 0) mt_conversation_cut(c, c->count - 1);
    return status;
}

void mt_inference_end_turn(mt_inference *r, const mt_sequence *sequence) {
    const mt_response *response = mt_responses_update(&r->responses, sequence);
    mt_conversation_add(&r->conversation, "assistant", response->text.data + response->prompt_bytes,
                        response->text.bytes - response->prompt_bytes);
}

/* ---- standard input */

/* While it waits for input, sends a sign of life to the other ranks, which would end the job after a timeout. */
static void await_input(const mt_inference *r) {
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    int64_t bytes = NOTHING_YET, seconds = r->options.stack.distributed_timeout_seconds;
    while (poll(&input, 1, seconds < 120 ? (int)seconds * 500 : 60000) == 0)
        mt_broadcast(&r->grid.world, &bytes, sizeof bytes, 0);
}

char *mt_inference_next_line(mt_inference *r, int64_t *bytes) {
    char *line = NULL;
    size_t capacity = 0;
    mt_error error;
    *bytes = -1;
    if (r->is_first && r->grid.world.size > 1) await_input(r);
    if (r->is_first && (*bytes = getline(&line, &capacity, stdin)) > 0) {
        if (line[*bytes - 1] == '\n') --*bytes;
        if (*bytes > 0 && line[*bytes - 1] == '\r') --*bytes;
    }
    if (r->is_first && ferror(stdin))
        *bytes = FAILED, mt_error_set(&error, "standard input: cannot be read: %s", strerror(errno));
    do mt_broadcast(&r->grid.world, bytes, sizeof *bytes, 0);
    while (*bytes == NOTHING_YET);
    if (*bytes == FAILED) mt_inference_check(r, r->is_first ? -1 : 0, &error);
    if (*bytes >= 0) {
        line = mt_realloc(line, *bytes + 1);
        mt_broadcast(&r->grid.world, line, *bytes, 0);
        return line;
    }
    free(line);
    return NULL;
}

/* ---- the whole */

/* --print-config, instead of generation. */
static void print_config(mt_inference *r) {
    mt_error error;
    int64_t ranks = mt_options_printed_ranks(&r->options, r->grid.world.size);
    int status = mt_options_read_shape(&r->options, &error);
    if (status == 0) status = mt_options_finish(&r->options, MT_PROGRAM_INFER, ranks, &error);
    if (r->is_first) mt_options_print_config(&r->options, MT_PROGRAM_INFER, ranks, status != 0 ? &error : NULL, stdout);
    mt_inference_check(r, mt_file_flush_output(&error), &error);
    mt_options_free(&r->options);
    mt_grid_stop(&r->grid);
}

bool mt_inference_open(mt_inference *r, int *argc, char ***argv) {
    *r = (mt_inference){0};
    mt_run_options *o = &r->options;
    mt_error error;
    mt_launch_threads(*argv);
    signal(SIGXFSZ, SIG_IGN); // exceeding a file size limit is then a write error
    if (mt_launch_check(*argv, &error) != 0) mt_die("%s", error.text);
    int status = mt_options_parse(o, MT_PROGRAM_INFER, *argc, *argv, &error);
    mt_watch_start(&o->stack, &o->typed_names);
    mt_grid_start(&r->grid, argc, argv);
    r->is_first = r->grid.world.rank == 0;
    mt_inference_check(r, status, &error);
    if (o->print_config) return print_config(r), false;
    mt_inference_check(r, mt_options_finish(o, MT_PROGRAM_INFER, r->grid.world.size, &error), &error);
    mt_inference_check(r, mt_options_agree(o, &r->grid.world, &error), &error);
    if (r->is_first) {
        mt_launch_answer_environment(stderr);
        mt_options_warn(o, MT_PROGRAM_INFER, stderr);
        mt_stops_warn(o, stderr);
    }
    mt_inference_check(r, mt_grid_build(&r->grid, &o->stack, &error), &error);
    r->folder = mt_checkpoint_resolve(o->load, &error);
    mt_inference_check(r, r->folder ? 0 : -1, &error);
    r->tokenizer_folder = mt_adapter_tokenizer_folder(o, r->folder, &error);
    mt_inference_check(r, r->tokenizer_folder ? 0 : -1, &error);
    r->context = o->stack.max_position_embeddings;
    return true;
}

void mt_inference_close(mt_inference *r) {
    mt_generator_destroy(r->generator);
    mt_model_destroy(r->model);
    mt_chat_close(r->chat);
    mt_conversation_cut(&r->conversation, 0);
    free(r->conversation.messages);
    mt_inference_cut_shown(r, 0);
    free(r->shown);
    mt_inference_forget_pictures(r);
    mt_tokenizer_close(r->tokenizer);
    mt_options_free(&r->options);
    free(r->folder);
    free(r->tokenizer_folder);
    mt_grid_stop(&r->grid);
}
