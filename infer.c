/* infer.c: continues texts with a trained model, or scores given tokens. Options: ./infer --help. How a token is
 * generated is in megatron.c §15. */
#include "megatron.h"

#include "data/tokenizer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { INTERACTIVE_CONTEXT = 8192 }; // tokens that the interactive mode has memory for, where the context is longer

typedef struct run {
    mt_options options;
    mt_grid grid;
    char *folder;            // holds config.json
    mt_tokenizer *tokenizer; // NULL: token ids in, token ids out
    int32_t bos;             // begins the model's texts; -1: none
    int64_t context;         // tokens of a sequence at most
    mt_model *model;
    mt_generator *generator;
    int64_t prompt_tokens, new_tokens; // so far, and the time they took
    double prompt_seconds, new_seconds;
} run;

/* What becomes of a sequence on the way to standard output. */
typedef struct reply {
    int64_t first, next; // tokens that are shown begin here; the next to be turned into text
    mt_decoder *decoder; // NULL: ids are shown
    mt_text text;        // not shown yet
    bool ended;
} reply;

/* Functions that fail fill an error; here is where it ends the program. */
static void check(int status, const mt_error *error) {
    if (status != 0) mt_die("%s", error->text);
}

static void open_tokenizer(run *r) {
    const mt_options *o = &r->options;
    mt_error error;
    bool begins;
    r->bos = -1;
    if (o->prompt_tokens && o->print_tokens) return;
    int status = o->tokenizer_type ? mt_tokenizer_open(&r->tokenizer, o->tokenizer_type, o->tokenizer_model, &error)
                                   : mt_tokenizer_open_folder(&r->tokenizer, r->folder, &error);
    if (status != 0) mt_die("%s; without a tokenizer: --prompt-tokens 1,2,3 --print-tokens", error.text);
    const char *path = o->tokenizer_type ? o->tokenizer_model : r->folder;
    check(mt_prompt_begins_with_bos(path, &begins, &error), &error);
    if (begins && o->bos_token_id >= 0) r->bos = mt_tokenizer_bos(r->tokenizer);
}

static void open_model(run *r, const mt_model_plan *plan) {
    mt_error error;
    mt_run_state state = {0};
    check(mt_model_create(&r->model, &r->options, &r->grid, &mt_cpu_ops, plan, &error), &error);
    check(mt_checkpoint_load(r->model, &state, r->options.load, &error), &error);
}

static void open_generator(run *r, int64_t count, int64_t max_tokens, int64_t prompt_tokens) {
    const mt_options *o = &r->options;
    mt_sampling sampling = {o->temperature, o->top_p, o->top_k, (uint64_t)o->seed};
    mt_model_plan plan = mt_generator_plan(count, max_tokens, prompt_tokens);
    mt_stops stops;
    mt_error error;
    check(mt_stops_read(&stops, r->folder, o, &error), &error);
    if (stops.count == 0 && r->tokenizer) stops = (mt_stops){{mt_tokenizer_eod(r->tokenizer)}, 1};
    open_model(r, &plan);
    r->generator = mt_generator_create(r->model, count, &sampling, &stops);
}

/* Encodes a text prompt as sequence `id`. */
static int begin_text(const run *r, mt_sequence *sequence, int64_t id, const char *text, mt_error *error) {
    mt_ids ids = {mt_malloc(4), 0, 1};
    if (r->bos >= 0) ids.data[ids.count++] = r->bos;
    int status = mt_tokenizer_encode(r->tokenizer, text, (int64_t)strlen(text), &ids, error);
    if (status == 0) status = mt_sequence_begin(sequence, id, ids.data, ids.count, r->context, &r->options, error);
    free(ids.data);
    return status;
}

static void reply_append(reply *to, const char *text) {
    int64_t bytes = (int64_t)strlen(text), needed = to->text.bytes + bytes;
    if (needed > to->text.capacity) to->text.data = mt_realloc(to->text.data, to->text.capacity = 2 * needed);
    memcpy(to->text.data + to->text.bytes, text, (size_t)bytes);
    to->text.bytes = needed;
}

/* Turns tokens that are new into text, or into their ids. */
static void reply_advance(const run *r, reply *to, const mt_sequence *sequence) {
    mt_error error;
    char id[16];
    for (; to->next < sequence->num_tokens; to->next++) {
        int32_t token = sequence->tokens[to->next];
        if (!to->decoder) {
            snprintf(id, sizeof id, to->next > to->first ? " %d" : "%d", token);
            reply_append(to, id);
        } else if (!mt_tokenizer_is_special(r->tokenizer, token)) {
            check(mt_decode_next(to->decoder, token, &to->text, &error), &error);
        }
    }
    if (!sequence->finished || to->ended) return;
    if (to->decoder) mt_decode_end(to->decoder, &to->text);
    reply_append(to, "\n");
    to->ended = true;
}

/* A reply shows ids of new tokens, or text: that of the prompt too, unless the reader has just typed it. */
static void reply_begin(const run *r, reply *to, const mt_sequence *sequence, int64_t count, bool show_prompt) {
    char header[64];
    to->first = sequence->num_tokens;
    if (r->options.print_tokens) {
        to->next = to->first;
        return;
    }
    snprintf(header, sizeof header, "%s== %lld of %lld ==\n", sequence->id > 0 ? "\n" : "", (long long)sequence->id + 1,
             (long long)count);
    if (count > 1) reply_append(to, header);
    to->decoder = mt_decoder_open(r->tokenizer);
    reply_advance(r, to, sequence); // the decoder must know what it continues
    if (!show_prompt) to->text.bytes = 0;
}

/* Generates sequences as one batch. They are shown in order, the first unfinished one as its tokens come. */
static void generate(run *r, mt_sequence *sequences, int64_t count, bool show_prompts) {
    mt_error error;
    int64_t unfinished = 0, shown = 0;
    reply *replies = mt_calloc(count * (int64_t)sizeof *replies);
    for (int64_t s = 0; s < count; s++) {
        reply_begin(r, &replies[s], &sequences[s], count, show_prompts);
        unfinished += !sequences[s].finished;
        r->prompt_tokens += sequences[s].num_tokens;
    }
    for (bool prompts = true;; prompts = false) {
        for (int64_t s = 0; s < count; s++) reply_advance(r, &replies[s], &sequences[s]);
        for (; shown < count; shown++) {
            mt_text *text = &replies[shown].text;
            fwrite(text->data, 1, (size_t)text->bytes, stdout);
            text->bytes = 0;
            if (!sequences[shown].finished) break;
        }
        if (fflush(stdout) != 0) mt_die("standard output: cannot be written: %s", strerror(errno));
        if (unfinished == 0) break;
        double start = mt_time();
        if (!prompts) r->new_tokens += unfinished;
        unfinished = mt_generator_step(r->generator, sequences, count, &error);
        if (unfinished < 0) mt_die("%s", error.text);
        *(prompts ? &r->prompt_seconds : &r->new_seconds) += mt_time() - start;
    }
    for (int64_t s = 0; s < count; s++) {
        mt_decoder_close(replies[s].decoder);
        free(replies[s].text.data);
        free(sequences[s].tokens);
    }
    free(replies);
}

/* --prompt and --prompt-tokens: all at once. */
static void answer_prompts(run *r) {
    const mt_options *o = &r->options;
    mt_error error;
    int64_t count = 0, longest = 0, prompt_tokens = 0;
    mt_sequence *sequences = NULL;
    if (o->prompt_tokens)
        check(mt_sequences_parse(&sequences, &count, r->context, o, &error), &error);
    else
        sequences = mt_malloc((count = o->prompt.count) * (int64_t)sizeof *sequences);
    for (int64_t s = 0; s < count; s++) {
        if (!o->prompt_tokens) check(begin_text(r, &sequences[s], s, o->prompt.items[s], &error), &error);
        if (sequences[s].max_tokens > longest) longest = sequences[s].max_tokens;
        prompt_tokens += sequences[s].num_tokens;
    }
    open_generator(r, count, longest, prompt_tokens);
    generate(r, sequences, count, true);
    free(sequences);
}

/* Without a prompt: each line of standard input is a new text to continue. Returns whether all could be. */
static bool answer_lines(run *r) {
    mt_error error;
    mt_sequence sequence;
    char *line = NULL;
    size_t capacity = 0;
    bool all = true, terminal = isatty(STDIN_FILENO);
    if (r->context > INTERACTIVE_CONTEXT) r->context = INTERACTIVE_CONTEXT;
    open_generator(r, 1, r->context, r->context);
    for (int64_t id = 0;; id++) {
        if (terminal) fprintf(stderr, "> ");
        ssize_t length = getline(&line, &capacity, stdin);
        if (length < 0) break;
        line[strcspn(line, "\r\n")] = '\0';
        if (line[0] == '\0') continue;
        if (begin_text(r, &sequence, id, line, &error) == 0) {
            generate(r, &sequence, 1, false);
        } else {
            fprintf(stderr, "error: %s\n", error.text);
            all = false;
        }
    }
    if (ferror(stdin)) mt_die("standard input: cannot be read: %s", strerror(errno));
    free(line);
    return all;
}

static void score(run *r) {
    mt_error error;
    mt_model_plan plan = mt_score_plan(&r->options);
    open_model(r, &plan);
    double start = mt_time();
    int64_t count = mt_score(r->model, &error);
    if (count < 0) mt_die("%s", error.text);
    fprintf(stderr, "scored %lld sequences of %lld tokens (%.1f tokens/s)\n", (long long)count,
            (long long)r->options.seq_length, (double)(count * r->options.seq_length) / (mt_time() - start));
}

int main(int argc, char **argv) {
    run r = {0};
    mt_options *o = &r.options;
    mt_error error;
    bool all = true;
    mt_grid_start(&r.grid, &argc, &argv);
    check(mt_options_parse(o, MT_PROGRAM_INFER, argc, argv, &error), &error);
    if (r.grid.world.rank == 0 && r.grid.world.size > 1)
        mt_die("infer runs on one rank in this version; start it without mpirun");
    mt_barrier(&r.grid.world);
    check(mt_options_finish(o, MT_PROGRAM_INFER, r.grid.world.size, &error), &error);
    if (!(r.folder = mt_checkpoint_resolve(o->load, &error))) mt_die("%s", error.text);
    r.context = o->max_position_embeddings;
    if (o->score) {
        score(&r);
    } else {
        open_tokenizer(&r);
        if (o->prompt_tokens || o->prompt.count > 0)
            answer_prompts(&r);
        else
            all = answer_lines(&r);
        fprintf(stderr, "read %lld tokens (%.1f tokens/s), then wrote %lld (%.1f tokens/s)\n",
                (long long)r.prompt_tokens, (double)r.prompt_tokens / r.prompt_seconds, (long long)r.new_tokens,
                (double)r.new_tokens / r.new_seconds);
    }
    mt_generator_destroy(r.generator);
    mt_model_destroy(r.model);
    mt_tokenizer_close(r.tokenizer);
    mt_options_free(o);
    free(r.folder);
    mt_grid_stop(&r.grid);
    return all ? 0 : 1;
}
