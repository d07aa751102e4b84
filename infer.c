/* infer.c: continues texts with a trained model, or scores given tokens. Options: ./infer --help. How a token is
 * generated is in megatron.c §15. Several ranks hold the model together and do the same; rank 0 reads and prints. */
#include "megatron.h"

#include "data/adapter.h"
#include "data/chat.h"
#include "data/checkpoint.h"
#include "data/file.h"
#include "data/host_memory.h"
#include "data/launch.h"
#include "data/options.h"
#include "data/prompts.h"
#include "data/report.h"
#include "data/response.h"
#include "data/rollout.h"
#include "data/score.h"
#include "data/sft.h"
#include "data/tokenizer.h"
#include "data/watchdog.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NOTHING_YET = -2, FAILED = -3 }; // instead of a line's bytes
enum { INTERACTIVE_CONTEXT = 8192 };    // tokens that the interactive mode has memory for, where the context is longer

typedef struct run {
    mt_options options;
    mt_grid grid;
    bool is_first;           // of the ranks: the one that talks
    char *folder;            // holds config.json
    mt_tokenizer *tokenizer; // NULL: token ids in, token ids out
    mt_error no_tokenizer;   // why the model's folder gives none, with --score
    const char *tokenizer_path;
    int32_t bos;     // begins the model's texts; -1: none
    int64_t context; // tokens of a sequence at most
    mt_model *model;
    mt_generator *generator;
    mt_responses responses; // the texts of the sequences at hand
    mt_chat *chat;          // --chat, else NULL
    mt_conversation conversation;
} run;

/* Ends the program if a function failed on any rank. Every rank calls it. */
static void check(run *r, int status, mt_error *error) {
    mt_report_refusal(&r->grid, &r->options, status, error);
}

static void open_tokenizer(run *r) {
    const mt_options *o = &r->options;
    mt_error error;
    bool begins;
    r->bos = -1;
    if (o->prompt_tokens && o->print_tokens && o->stop.count == 0) return;
    int status = o->tokenizer_type ? mt_tokenizer_open(&r->tokenizer, o->tokenizer_type, o->tokenizer_model, &error)
                                   : mt_tokenizer_open_folder(&r->tokenizer, r->folder, &error);
    if (status != 0 && o->score && !o->tokenizer_type) { // the lines may be tokens
        r->tokenizer = NULL, r->no_tokenizer = error;
        return;
    }
    if (status != 0) {
        mt_error why = error;
        mt_error_set(&error, "%s; without a tokenizer: --prompt-tokens 1,2,3 --print-tokens", why.text);
    }
    check(r, status, &error);
    r->tokenizer_path = o->tokenizer_model ? o->tokenizer_model : r->folder;
    check(r, mt_prompt_begins_with_bos(r->tokenizer_path, &begins, &error), &error);
    if (begins && o->bos_token_id >= 0) r->bos = mt_tokenizer_bos(r->tokenizer);
}

static void open_model(run *r, mt_model_plan *plan) {
    mt_error error;
    mt_run_state state = {0};
    const mt_ops *ops = mt_backend_open(r->options.device, &r->grid, &error);
    plan->host_memory = mt_host_memory_available("");
    check(r, ops ? mt_model_create(&r->model, &r->options, &r->grid, ops, plan, &error) : -1, &error);
    check(r, mt_checkpoint_load(r->model, &state, r->options.load, &error), &error);
    mt_watch_enter(MT_WATCH_STEP);
}

/* A generator for `prompts` prompts of prompt_tokens tokens in all, with sequences of at most max_tokens tokens. */
static void open_generator(run *r, int64_t prompts, int64_t max_tokens, int64_t prompt_tokens) {
    const mt_options *o = &r->options;
    mt_sampling sampling = {.temperature = o->temperature, .top_p = o->top_p, .top_k = o->top_k};
    mt_model_plan plan = {.max_tokens = mt_min(prompt_tokens, MT_PREFILL_TOKENS)};
    mt_stops stops;
    mt_error error;
    int64_t replicas = r->grid.data.size, each = (prompts + replicas - 1) / replicas * o->num_return_sequences;
    sampling.min_p = o->min_p, sampling.repetition_penalty = o->repetition_penalty;
    sampling.seed = (uint64_t)o->seed, sampling.logprobs = o->out != NULL;
    check(r, mt_stops_read(&stops, r->folder, o, &error), &error);
    if (r->chat && stops.count < MT_MAX_STOPS) stops.ids[stops.count++] = mt_chat_end(r->chat);
    if (stops.count == 0 && r->tokenizer) stops = (mt_stops){.ids = {mt_tokenizer_eod(r->tokenizer)}, .count = 1};
    if (o->stop.count > 0) stops.ends_text = mt_responses_end, stops.context = &r->responses;
    plan.page_rows = o->inference_dynamic_batching_block_size;
    mt_plan_generation(&plan, mt_min(each, o->inference_max_requests), max_tokens, o->kv_cache_tokens);
    open_model(r, &plan);
    if (r->is_first) mt_report_inference(r->model, r->context, stderr);
    r->generator = mt_generator_create(r->model, &sampling, &stops);
}

/* Encodes a text of some bytes as sequence `id`. */
static int begin_text(const run *r, mt_sequence *sequence, int64_t id, const char *text, int64_t bytes,
                      mt_error *error) {
    mt_ids ids = {mt_malloc(4), 0, 1};
    if (r->bos >= 0) ids.data[ids.count++] = r->bos;
    int status = mt_tokenizer_encode(r->tokenizer, text, bytes, &ids, error);
    if (status == 0) status = mt_sequence_begin(sequence, id, ids.data, ids.count, r->context, &r->options, error);
    free(ids.data);
    return status;
}

/* ---- a conversation */

static void open_chat(run *r) {
    const mt_options *o = &r->options;
    mt_error error;
    check(r, mt_chat_open(&r->chat, o->chat_template, r->tokenizer, r->tokenizer_path, &error), &error);
    if (o->system_prompt)
        mt_conversation_add(&r->conversation, "system", o->system_prompt, (int64_t)strlen(o->system_prompt));
}

/* Begins the response to the conversation as sequence `id`. The generator has what came before in its cache. */
static int begin_response(run *r, mt_sequence *sequence, int64_t id, mt_error *error) {
    const mt_conversation *c = &r->conversation;
    mt_ids ids = {0}, turns = {0};
    int status = mt_chat_encode(r->chat, c->messages, c->count, true, &ids, &turns, error);
    if (status == 0) status = mt_sequence_begin(sequence, id, ids.data, ids.count, r->context, &r->options, error);
    free(ids.data);
    free(turns.data);
    return status;
}

/* A message of the user. If the conversation no longer fits in the context, it starts again with this message. */
static int begin_turn(run *r, mt_sequence *sequence, int64_t id, const char *line, int64_t bytes, mt_error *error) {
    mt_conversation *c = &r->conversation;
    int64_t first = r->options.system_prompt != NULL;
    mt_conversation_add(c, "user", line, bytes);
    int status = begin_response(r, sequence, id, error);
    if (status != 0 && c->count > first + 1) {
        mt_conversation_cut(c, first);
        mt_conversation_add(c, "user", line, bytes);
        status = begin_response(r, sequence, id, error);
        if (status == 0 && r->is_first)
            fprintf(stderr, "note: the context of %lld tokens is full; the conversation starts again\n",
                    (long long)r->context);
    }
    if (status != 0) mt_conversation_cut(c, c->count - 1);
    return status;
}

/* The response becomes a message. */
static void end_turn(run *r, const mt_sequence *sequence) {
    const mt_response *response = mt_responses_update(&r->responses, sequence);
    mt_conversation_add(&r->conversation, "assistant", response->text.data + response->prompt_bytes,
                        response->text.bytes - response->prompt_bytes);
}

/* ---- texts to continue */

/* The part of the output that is on the screen. */
typedef struct screen {
    int64_t sequence; // the sequence to be shown next
    bool begun;
    int64_t shown; // of its tokens, with --print-tokens, else of the bytes of its text
} screen;

/* Shows what is new of sequences, in order: a sequence as its tokens come, once all before it have ended. */
static void show(run *r, screen *at, const mt_sequence *sequences, int64_t count, bool show_prompts) {
    bool tokens = r->options.print_tokens;
    for (; at->sequence < count; *at = (screen){at->sequence + 1, false, 0}) {
        const mt_sequence *sequence = &sequences[at->sequence];
        if (!at->begun && count > 1 && !tokens)
            printf("%s== %lld of %lld ==\n", at->sequence ? "\n" : "", (long long)at->sequence + 1, (long long)count);
        at->begun = true;
        if (tokens) {
            for (at->shown = mt_max(at->shown, sequence->num_prompt); at->shown < sequence->num_tokens; at->shown++)
                printf(at->shown > sequence->num_prompt ? " %d" : "%d", sequence->tokens[at->shown]);
        } else {
            const mt_response *response = mt_responses_update(&r->responses, sequence);
            int64_t from = mt_max(at->shown, show_prompts ? 0 : response->prompt_bytes);
            at->shown = mt_max(from, mt_responses_settled(&r->responses, response));
            fwrite(response->text.data + from, 1, (size_t)(at->shown - from), stdout);
        }
        if (sequence->finish == MT_UNFINISHED) break;
        printf("\n");
    }
}

/* Generates sequences and shows them. Data-parallel ranks share them; then they are shown at the end. */
static void generate(run *r, mt_sequence *sequences, int64_t count, bool show_prompts) {
    mt_error error, unwritten;
    screen at = {0};
    int shown = 0; // -1: standard output failed, on rank 0 alone
    if (r->tokenizer) r->responses = mt_responses_open(r->tokenizer, &r->options.stop, sequences[0].id, count);
    for (int64_t left = mt_sequences_unfinished(sequences, count);;) {
        if (r->is_first && !r->options.out) show(r, &at, sequences, count, show_prompts);
        if (shown == 0 && (fflush(stdout) != 0 || ferror(stdout)))
            shown = mt_error_set(&unwritten, "standard output: cannot be written: %s", strerror(errno));
        if (left == 0 || r->grid.world.size == 1) check(r, shown, &unwritten); // other ranks learn it at the end
        if (left == 0) break;
        if (r->grid.data.size > 1) {
            check(r, mt_sequences_generate(&r->grid, r->generator, sequences, count, &error), &error);
            left = 0;
        } else {
            left = mt_generator_step(r->generator, sequences, count, &error);
            if (left < 0) check(r, -1, &error); // on every rank: all have the same logits
        }
    }
    for (int64_t s = 0; s < count; s++) {
        if (r->is_first && sequences[s].num_tokens == r->context && sequences[s].max_tokens == r->context)
            fprintf(stderr, "note: prompt %lld ends at the context of %lld tokens\n",
                    (long long)(sequences[s].id / r->options.num_return_sequences) + 1, (long long)r->context);
        if (r->chat) end_turn(r, &sequences[s]);
    }
}

/* Frees the sequences that were generated, and their texts. */
static void forget(run *r, mt_sequence *sequences, int64_t count) {
    for (int64_t s = 0; s < count; s++) mt_sequence_end(&sequences[s]);
    mt_responses_close(&r->responses);
}

/* Checks that --out can be written, before the work; leaves nothing behind. */
static void check_out(run *r) {
    mt_error error, unused;
    mt_new_file file = {0};
    int status = r->is_first && r->options.out ? mt_new_file_open(&file, r->options.out, "--out", &error) : 0;
    (void)mt_new_file_close(&file, -1, &unused);
    check(r, status, &error);
}

/* --out: a line for each sequence. */
static void write_responses(run *r, const mt_sequence *sequences, int64_t count) {
    mt_error error;
    mt_new_file file = {0};
    int status = r->is_first ? mt_new_file_open(&file, r->options.out, "--out", &error) : 0;
    for (int64_t s = 0; s < count && status == 0 && r->is_first; s++)
        mt_response_write(file.stream, &sequences[s],
                          r->tokenizer ? mt_responses_update(&r->responses, &sequences[s]) : NULL,
                          r->options.num_return_sequences);
    check(r, mt_new_file_close(&file, status, &error), &error);
}

/* The prompts of a file, the same on every rank. */
static mt_samples read_prompts(run *r) {
    char *path = r->options.prompts;
    const char *name = "prompts";
    mt_samples prompts;
    mt_error error;
    mt_sft_config config = {.paths = {1, &path}, .tokenizer_path = r->tokenizer_path, .prompts = true};
    config.chat_template = r->options.chat_template, config.vocab_size = r->options.vocab_size;
    config.seq_length = r->context - 1, config.refuses_long = true; // a line of results for each line
    check(r, mt_samples_read(&prompts, &config, r->tokenizer, &error), &error);
    uint64_t print = mt_samples_fingerprint(&prompts);
    check(r, mt_fingerprints_agree(&print, &name, 1, &r->grid.world, &error), &error);
    return prompts;
}

/* Begins a sequence from prompt `i` of --prompts, --prompt or --prompt-tokens. */
static int begin_prompt(const run *r, const mt_samples *prompts, int64_t i, mt_sequence *sequence, int64_t id,
                        mt_error *error) {
    const mt_options *o = &r->options;
    if (o->prompt_tokens) return mt_sequence_parse(sequence, id, o->prompt_tokens, r->context, o, error);
    if (o->prompt.count > 0)
        return begin_text(r, sequence, id, o->prompt.items[i], (int64_t)strlen(o->prompt.items[i]), error);
    int64_t first = prompts->offsets[i], tokens = prompts->offsets[i + 1] - first;
    return mt_sequence_begin(sequence, id, prompts->tokens + first, tokens, r->context, o, error);
}

/* --prompt or --prompts, all texts at once, or --prompt-tokens. */
static void answer_prompts(run *r) {
    const mt_options *o = &r->options;
    mt_error error;
    mt_samples prompts = {0};
    if (o->prompts) prompts = read_prompts(r);
    int64_t each = o->num_return_sequences, count = each * mt_max(prompts.count + o->prompt.count, 1);
    int64_t longest = 0, prompt_tokens = 0;
    mt_sequence *sequences = mt_malloc(count * (int64_t)sizeof *sequences);
    for (int64_t s = 0; s < count; s++) {
        check(r, begin_prompt(r, &prompts, s / each, &sequences[s], s, &error), &error);
        longest = mt_max(longest, sequences[s].max_tokens);
        prompt_tokens += s % each == 0 ? sequences[s].num_prompt : 0;
    }
    check_out(r);
    open_generator(r, count / each, longest, prompt_tokens);
    generate(r, sequences, count, true);
    if (o->out) write_responses(r, sequences, count);
    forget(r, sequences, count);
    mt_samples_free(&prompts);
    free(sequences);
}

/* While it waits for input, sends a sign of life to the other ranks, which would end the job after a timeout. */
static void await_input(const run *r) {
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    int64_t bytes = NOTHING_YET, seconds = r->options.distributed_timeout_seconds;
    while (poll(&input, 1, seconds < 120 ? (int)seconds * 500 : 60000) == 0)
        mt_broadcast(&r->grid.world, &bytes, sizeof bytes, 0);
}

/* The next line of standard input without its end, for every rank, to free, and its bytes; NULL at the end. A zero byte
 * is a byte like others. */
static char *next_line(run *r, int64_t *bytes) {
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
    if (*bytes == FAILED) check(r, r->is_first ? -1 : 0, &error);
    if (*bytes >= 0) {
        line = mt_realloc(line, *bytes + 1);
        mt_broadcast(&r->grid.world, line, *bytes, 0);
        return line;
    }
    free(line);
    return NULL;
}

/* Without a prompt: each line of standard input is a new text to continue, or with --chat a message of the user. False
 * if a text could not be continued. */
static bool answer_lines(run *r) {
    mt_error error;
    mt_sequence sequence;
    char *line = NULL;
    int64_t bytes;
    bool all = true, terminal = r->is_first && isatty(STDIN_FILENO);
    if (r->context > INTERACTIVE_CONTEXT) r->context = INTERACTIVE_CONTEXT;
    open_generator(r, 1, r->context, r->context);
    if (r->grid.world.size > 1) setvbuf(stdin, NULL, _IONBF, 0); // poll does not see input that stdio has read ahead
    for (int64_t id = 0;; id++) {
        free(line);
        if (terminal) fprintf(stderr, "> ");
        if (!(line = next_line(r, &bytes))) break;
        if (bytes == 0) continue;
        int status = r->chat ? begin_turn(r, &sequence, id, line, bytes, &error)
                             : begin_text(r, &sequence, id, line, bytes, &error);
        if (status == 0) {
            generate(r, &sequence, 1, false);
            forget(r, &sequence, 1);
        } else {
            if (r->is_first) fprintf(stderr, "error: %s\n", error.text);
            all = false;
        }
    }
    if (terminal) fprintf(stderr, "\n");
    return all;
}

/* Rates of all data-parallel ranks together. */
static void print_rates(const run *r) {
    mt_generator_totals t = mt_generator_read_totals(r->generator);
    double tokens[] = {(double)t.prefill_tokens, (double)t.decode_tokens};
    mt_all_reduce_sum(&r->grid.data, tokens, 2, MT_F64);
    if (!r->is_first) return;
    fprintf(stderr, "read %.0f tokens, %.1f tokens/s; then wrote %.0f, %.1f tokens/s\n", tokens[0],
            t.prefill_tokens ? tokens[0] / t.prefill_seconds : 0, tokens[1],
            t.decode_tokens ? tokens[1] / t.decode_seconds : 0);
}

static void score(run *r) {
    mt_error error;
    mt_model_plan plan;
    mt_scoring *scoring;
    int64_t tokens;
    if (mt_text_ends_with(r->options.score, ".jsonl")) open_tokenizer(r);
    int status = mt_scoring_open(&scoring, &r->options, r->tokenizer, r->tokenizer_path, &plan, &error);
    if (status != 0 && *r->no_tokenizer.text) {
        mt_error why = error;
        mt_error_set(&error, "%.2000s (%.1000s)", why.text, r->no_tokenizer.text);
    }
    check(r, status, &error);
    open_model(r, &plan);
    double start = mt_time();
    int64_t count = mt_scoring_run(scoring, r->model, &tokens, &error);
    check(r, count < 0 ? -1 : 0, &error);
    mt_scoring_close(scoring);
    if (!r->is_first) return;
    mt_report_inference(r->model, r->context, stderr);
    fprintf(stderr, "scored %lld sequences, %.1f tokens/s\n", (long long)count, (double)tokens / (mt_time() - start));
}

/* --print-config, instead of generation. */
static int print_config(run *r) {
    mt_error error;
    int64_t ranks = mt_options_printed_ranks(&r->options, r->grid.world.size);
    int status = mt_options_read_shape(&r->options, &error);
    if (status == 0) status = mt_options_finish(&r->options, MT_PROGRAM_INFER, ranks, &error);
    if (r->is_first) mt_options_print_config(&r->options, MT_PROGRAM_INFER, ranks, status != 0 ? &error : NULL, stdout);
    mt_options_free(&r->options);
    mt_grid_stop(&r->grid);
    return 0;
}

/* --merge-adapter. The tokenizer is that of the base. */
static void merge(run *r) {
    mt_error error;
    mt_model_plan plan = mt_generator_plan(1, 1, 1);
    open_model(r, &plan);
    int status = 0;
    if (r->is_first && mt_tokenizer_open_folder(&r->tokenizer, r->folder, &error) != 0) r->tokenizer = NULL;
    check(r, mt_adapter_merge(r->model, &error), &error);
    if (r->tokenizer) status = mt_tokenizer_save(r->tokenizer, r->options.merge_adapter, &error);
    check(r, status, &error);
    if (r->is_first) printf("wrote the merged model to %s\n", r->options.merge_adapter);
}

int main(int argc, char **argv) {
    run r = {0};
    mt_options *o = &r.options;
    mt_error error;
    bool all = true;
    if (mt_launch_check(argv, &error) != 0) mt_die("%s", error.text);
    int status = mt_options_parse(o, MT_PROGRAM_INFER, argc, argv, &error);
    mt_watch_start(o);
    mt_grid_start(&r.grid, &argc, &argv);
    r.is_first = r.grid.world.rank == 0;
    check(&r, status, &error);
    if (o->print_config) return print_config(&r);
    check(&r, mt_options_finish(o, MT_PROGRAM_INFER, r.grid.world.size, &error), &error);
    check(&r, mt_options_agree(o, &r.grid.world, &error), &error);
    check(&r, mt_grid_build(&r.grid, o, &error), &error);
    r.folder = mt_checkpoint_resolve(o->load, &error);
    check(&r, r.folder ? 0 : -1, &error);
    r.context = o->max_position_embeddings;
    if (o->merge_adapter) {
        merge(&r);
    } else if (o->score) {
        score(&r);
    } else {
        open_tokenizer(&r);
        if (o->chat) open_chat(&r);
        if (o->prompt_tokens || o->prompts || o->prompt.count > 0)
            answer_prompts(&r);
        else
            all = answer_lines(&r);
        print_rates(&r);
    }
    mt_generator_destroy(r.generator);
    mt_model_destroy(r.model);
    mt_chat_close(r.chat);
    mt_conversation_cut(&r.conversation, 0);
    free(r.conversation.messages);
    mt_tokenizer_close(r.tokenizer);
    mt_options_free(o);
    free(r.folder);
    mt_grid_stop(&r.grid);
    return all ? 0 : 1;
}
