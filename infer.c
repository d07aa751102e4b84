/* infer.c: continues texts with a trained model, or scores given tokens. Options: ./infer --help. How a token is
 * generated is in megatron.c §16; what a run opens, and where its prompts come from: data/run/inference.c. Several
 * ranks hold the model together and do the same; rank 0 reads and prints. */
#include "data/base/file.h"
#include "data/tokens/prompts.h"
#include "data/models/generate.h"
#include "data/options/option_finish.h"
#include "data/checkpoint/adapter.h"
#include "data/checkpoint/adapter_merge.h"
#include "data/checkpoint/convert.h"
#include "data/report/report.h"
#include "data/run/inference.h"
#include "data/run/picture_prompts.h"
#include "data/run/score.h"
#include "data/serve/serve.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { INTERACTIVE_CONTEXT = 8192 }; // tokens that the interactive mode has memory for, where the context is longer

/* The part of the output that is on the screen. */
typedef struct screen {
    int64_t sequence; // the sequence to be shown next
    bool begun;
    int64_t shown; // of its tokens, with --print-tokens, else of the bytes of its text
} screen;

/* Shows what is new of sequences, in order: a sequence as its tokens come, once all before it have ended. */
static void show(mt_inference *r, screen *at, const mt_sequence *sequences, int64_t count, bool show_prompts) {
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
            if (at->shown > from) fwrite(response->text.data + from, 1, (size_t)(at->shown - from), stdout);
        }
        if (sequence->finish == MT_UNFINISHED) break;
        printf("\n");
    }
}

/* Generates sequences and shows them. Data-parallel ranks share them; then they are shown at the end. */
static void generate(mt_inference *r, mt_sequence *sequences, int64_t count, bool show_prompts) {
    mt_error error, unwritten;
    screen at = {0};
    int shown = 0; // -1: standard output failed, on rank 0 alone
    if (r->tokenizer) r->responses = mt_responses_open(r->tokenizer, &r->options.stop, sequences[0].id, count);
    for (int64_t left = mt_sequences_unfinished(sequences, count);;) {
        if (r->is_first && !r->options.out) show(r, &at, sequences, count, show_prompts);
        if (shown == 0) shown = mt_file_flush_output(&unwritten);
        if (left == 0 || r->grid.world.size == 1)
            mt_inference_check(r, shown, &unwritten); // other ranks learn it at the end
        if (left == 0) break;
        if (r->grid.data.size > 1) {
            mt_inference_check(r, mt_sequences_generate(&r->grid, r->generator, sequences, count, NULL, &error),
                               &error);
            left = 0;
        } else {
            left = mt_generator_step(r->generator, sequences, count, &error);
            if (left < 0) mt_inference_check(r, -1, &error); // on every rank: all have the same logits
        }
    }
    for (int64_t s = 0; s < count; s++) {
        if (r->is_first && sequences[s].num_tokens == r->context && sequences[s].max_tokens == r->context)
            fprintf(stderr, "note: prompt %lld ends at the context of %lld tokens\n",
                    (long long)(sequences[s].id / r->options.num_return_sequences) + 1, (long long)r->context);
        if (r->options.chat) mt_inference_end_turn(r, &sequences[s]);
    }
}

/* Frees the sequences that were generated, and their texts. */
static void forget(mt_inference *r, mt_sequence *sequences, int64_t count) {
    for (int64_t s = 0; s < count; s++) mt_sequence_end(&sequences[s]);
    mt_responses_close(&r->responses);
    mt_inference_forget_pictures(r);
}

/* Checks that --out can be written and is not --prompts, before the work; leaves nothing behind. */
static void check_out(mt_inference *r) {
    const mt_run_options *o = &r->options;
    mt_error error, unused;
    mt_new_file file = {0};
    int status = r->is_first && o->out ? mt_new_file_open(&file, o->out, "--out", &error) : 0;
    (void)mt_new_file_close(&file, -1, &unused);
    if (status == 0 && r->is_first && o->out && o->prompts && mt_path_same(o->prompts, o->out))
        status = mt_error_set(&error, "--prompts and --out name one file, %s; give each its own", o->prompts);
    mt_inference_check(r, status, &error);
}

/* --out: a line for each sequence. */
static void write_responses(mt_inference *r, const mt_sequence *sequences, int64_t count) {
    mt_error error;
    mt_new_file file = {0};
    int status = r->is_first ? mt_new_file_open(&file, r->options.out, "--out", &error) : 0;
    for (int64_t s = 0; s < count && status == 0 && r->is_first; s++)
        mt_response_write(file.stream, &sequences[s],
                          r->tokenizer ? mt_responses_update(&r->responses, &sequences[s]) : NULL,
                          r->options.num_return_sequences);
    mt_inference_check(r, mt_new_file_close(&file, status, &error), &error);
}

/* --prompt or --prompts, all texts at once, or --prompt-tokens. */
static void answer_prompts(mt_inference *r) {
    const mt_run_options *o = &r->options;
    mt_error error;
    mt_samples prompts = {0};
    if (o->prompts) prompts = mt_inference_read_prompts(r);
    int64_t each = o->num_return_sequences, count = each * mt_max(prompts.count + o->prompt.count, 1);
    int64_t longest = 0, prompt_tokens = 0;
    mt_sequence *sequences = mt_malloc(count * (int64_t)sizeof *sequences);
    for (int64_t s = 0; s < count; s++) {
        int status = s % each > 0 ? mt_inference_begin_sample(r, &sequences[s - 1], &sequences[s], s, &error)
                                  : mt_inference_begin_prompt(r, &prompts, s / each, &sequences[s], s, &error);
        mt_inference_check(r, status, &error);
        longest = mt_max(longest, sequences[s].max_tokens);
        prompt_tokens += s % each == 0 ? sequences[s].num_prompt : 0;
        r->max_inputs = mt_max(r->max_inputs, sequences[s].num_inputs);
    }
    check_out(r);
    mt_inference_open_generator(r, count / each, longest, prompt_tokens);
    if (r->is_first && o->out) mt_new_file_note(o->out, "--out");
    bool show_prompts = r->max_inputs == 0 && o->image.count == 0; // no input of an encoder, and no header of a message
    generate(r, sequences, count, show_prompts);
    if (o->out) write_responses(r, sequences, count);
    forget(r, sequences, count);
    mt_samples_free(&prompts);
    free(sequences);
}

/* Without a prompt: each line of standard input is a new text to continue, or with --chat a message of the user. False
 * if a text could not be continued. */
static bool answer_lines(mt_inference *r) {
    mt_error error;
    mt_sequence sequence;
    char *line = NULL;
    int64_t bytes;
    bool all = true, terminal = r->is_first && isatty(STDIN_FILENO);
    if (r->context > INTERACTIVE_CONTEXT) r->context = INTERACTIVE_CONTEXT;
    if (r->options.stack.decoder_num_layers > 0) r->max_inputs = r->context;
    mt_inference_open_generator(r, 1, r->context, r->context);
    if (r->grid.world.size > 1) setvbuf(stdin, NULL, _IONBF, 0); // poll does not see input that stdio has read ahead
    for (int64_t id = 0;; id++) {
        free(line);
        if (terminal) fprintf(stderr, "> ");
        if (!(line = mt_inference_next_line(r, &bytes))) break;
        if (bytes == 0) continue;
        int status = r->chat ? mt_inference_show_line(r, line, bytes, &error) : 0;
        if (status > 0) continue; // a picture for the next message
        if (status == 0)
            status = r->chat ? mt_inference_begin_turn(r, &sequence, id, line, bytes, &error)
                             : mt_inference_begin_text(r, &sequence, id, line, bytes, &error);
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
static void print_rates(const mt_inference *r) {
    mt_generator_totals t = mt_generator_read_totals(r->generator);
    double tokens[] = {(double)t.prefill_tokens, (double)t.decode_tokens, (double)t.new_tokens,
                       (double)t.drafted_tokens, (double)t.accepted_tokens};
    mt_all_reduce_sum(&r->grid.data, tokens, 5, MT_F64);
    if (!r->is_first) return;
    fprintf(stderr, "read %.0f tokens, %.1f tokens/s; then wrote %.0f, %.1f tokens/s\n", tokens[0],
            t.prefill_tokens ? tokens[0] / t.prefill_seconds : 0, tokens[2],
            t.decode_tokens ? tokens[1] / t.decode_seconds : 0);
    if (r->options.num_speculative_tokens > 0)
        fprintf(stderr, "accepted %.0f of %.0f drafted tokens\n", tokens[4], tokens[3]);
}

static void score(mt_inference *r) {
    mt_error error;
    mt_model_plan plan;
    mt_scoring *scoring;
    int64_t tokens;
    if (mt_options_score_samples(&r->options)) mt_inference_open_tokenizer(r);
    int status = mt_scoring_open(&scoring, &r->options, r->tokenizer, r->tokenizer_path, &plan, &error);
    if (status != 0 && *r->no_tokenizer.text) {
        mt_error why = error;
        mt_error_set(&error, "%.2000s (%.1000s)", why.text, r->no_tokenizer.text);
    }
    mt_inference_check(r, status, &error);
    mt_inference_open_model(r, &plan);
    double start = mt_time();
    int64_t count = mt_scoring_run(scoring, r->model, &tokens, &error);
    mt_inference_check(r, count < 0 ? -1 : 0, &error);
    mt_scoring_close(scoring);
    if (!r->is_first) return;
    mt_report_inference(r->model, &r->options, r->context, stderr);
    fprintf(stderr, "scored %lld sequences, %.1f tokens/s\n", (long long)count, (double)tokens / (mt_time() - start));
}

/* The tokenizer of --load or --load-adapter, for another folder. */
static void keep_tokenizer(mt_inference *r) {
    mt_error error;
    int status = 0;
    if (r->is_first && mt_folder_has_tokenizer(r->tokenizer_folder))
        status = mt_tokenizer_keep_folder(&r->tokenizer, r->tokenizer_folder, &error);
    else if (r->is_first &&
             mt_tokenizer_open_folder(&r->tokenizer, r->tokenizer_folder, &error) != 0) // ByteLevel, or none
        r->tokenizer = NULL;
    mt_inference_check(r, status, &error);
}

/* --convert: rank 0 alone, without a model. */
static void convert(mt_inference *r) {
    mt_error error;
    keep_tokenizer(r);
    int status = r->is_first ? mt_checkpoint_convert(&r->options, r->tokenizer, &error) : 0;
    mt_inference_check(r, status, &error);
    if (r->is_first) printf("wrote the weights to %s\n", r->options.convert);
}

/* --merge-adapter. */
static void merge(mt_inference *r) {
    mt_error error;
    mt_model_plan plan = mt_generator_plan(1, 1, 1);
    mt_inference_open_model(r, &plan);
    keep_tokenizer(r);
    mt_inference_check(r, mt_adapter_merge(r->model, &r->options, r->tokenizer, &error), &error);
    if (r->is_first) printf("wrote the merged model to %s\n", r->options.merge_adapter);
}

int main(int argc, char **argv) {
    mt_inference r;
    bool all = true;
    if (!mt_inference_open(&r, &argc, &argv)) return 0;
    const mt_run_options *o = &r.options;
    if (o->convert) {
        convert(&r);
    } else if (o->merge_adapter) {
        merge(&r);
    } else if (o->score) {
        score(&r);
    } else {
        mt_inference_open_tokenizer(&r);
        if (o->serve) mt_serve(&r);
        if (o->chat || o->image.count > 0) mt_inference_open_chat(&r);
        if (o->prompt_tokens || o->prompts || o->prompt.count > 0)
            answer_prompts(&r);
        else if (!o->serve)
            all = answer_lines(&r);
        print_rates(&r);
    }
    mt_inference_close(&r);
    return all ? 0 : 1;
}
