/* score.c: scores of the tokens in a file. Each data-parallel rank scores the micro-batches that are dealt to it; one
 * rank of each replica, which has the loss, sends its results to rank 0. */
#include "score.h"

#include "../base/file.h"
#include "../datasets/packing.h"
#include "../datasets/sft.h"
#include "../models/model_role.h"
#include "../options/option_finish.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The files that are written. A stream is NULL where no file is wanted, and on all ranks but the first. */
enum { RESULTS, ENTROPY, LOGITS, NUM_OUTPUTS };

/* The scores of a token. */
enum { RESULT, TOKEN_ENTROPY, NUM_SCORES };

struct mt_scoring {
    const mt_run_options *options;
    int64_t count, longest; // sequences; positions of the longest
    int64_t at_once;        // sequences of a micro-batch
    int descriptor;         // of int32 tokens; -1: samples
    mt_samples samples;
    /* while it runs */
    mt_model *model;
    int64_t first, micro_batches; // of the round at hand: its first sequence; per data-parallel rank
    int *owners;                  // [data-parallel ranks] the rank of each replica that sends its results
    float *scores;                // [micro_batches, at_once, longest, NUM_SCORES] of this rank
    mt_error error;               // of reading, on this rank
    int status;
    mt_new_file out[NUM_OUTPUTS];
};

/* ---- sequences */

/* int32 sequences of seq_length + 1 tokens each. */
static int open_tokens(mt_scoring *s, mt_error *error) {
    const mt_run_options *o = s->options;
    int64_t bytes, bytes_each = (o->stack.seq_length + 1) * 4;
    if (o->stack.seq_length == 0) return mt_error_set(error, "--score %s: needs --seq-length", o->score);
    if (o->stack.head_type != MT_HEAD_LM && (o->entropy_out || o->logits_out))
        return mt_error_set(error,
                            "%s: the model of --load %s has a value head and so no distribution over tokens; leave it "
                            "out",
                            o->entropy_out ? "--entropy-out" : "--logits-out", o->load);
    s->descriptor = mt_file_open(o->score, &bytes, error);
    if (s->descriptor < 0) return -1;
    s->count = bytes / bytes_each, s->longest = o->stack.seq_length;
    if (bytes > 0 && bytes % bytes_each == 0) return 0;
    return mt_error_set(error,
                        "%s: %lld bytes are not whole sequences of --seq-length %lld + 1 int32 tokens (%lld bytes "
                        "each); give the --seq-length that the file was made for",
                        o->score, (long long)bytes, (long long)o->stack.seq_length, (long long)bytes_each);
}

static int open_samples(mt_scoring *s, const mt_tokenizer *tokenizer, const char *tokenizer_path, mt_error *error) {
    const mt_run_options *o = s->options;
    char *path = o->score;
    mt_sft_config config = {.paths = {1, &path}, .tokenizer_path = tokenizer_path, .vocab_size = o->stack.vocab_size};
    config.seq_length = o->stack.seq_length > 0 ? o->stack.seq_length : o->stack.max_position_embeddings;
    config.chat_template_kwargs = o->chat_template_kwargs;
    config.chat_template = o->chat_template, config.whole = o->stack.head_type != MT_HEAD_LM;
    config.scores = config.refuses_long = true; // a line of results for each line
    mt_image_reader reader;
    if (o->stack.vision.tower != MT_VISION_NONE) {
        if (mt_image_reader_open(&reader, o, tokenizer_path, error) != 0) return -1;
        config.images = &reader;
    }
    if (o->entropy_out || o->logits_out)
        return mt_error_set(error,
                            "--score %s: --out gets a line of JSON for each sequence, with its entropies; leave "
                            "out --entropy-out and --logits-out",
                            o->score);
    if (mt_samples_read(&s->samples, &config, tokenizer, error) != 0) return -1;
    s->count = s->samples.count;
    for (int64_t i = 0; i < s->count; i++) s->longest = mt_max(s->longest, mt_sample_length(&s->samples, i));
    return 0;
}

/* The most patches of the samples that are scored at once, s->at_once neighbours. */
static int64_t most_patches(const mt_scoring *s) {
    const mt_samples *samples = &s->samples;
    int64_t most = 0;
    for (int64_t i = 0; i < s->count && samples->image_offsets; i += s->at_once) {
        int64_t patches = 0, end = samples->image_offsets[mt_min(i + s->at_once, s->count)];
        for (int64_t k = samples->image_offsets[i]; k < end; k++)
            patches += samples->images.items[k].grid.height * samples->images.items[k].grid.width;
        most = mt_max(most, patches);
    }
    return most;
}

int mt_scoring_open(mt_scoring **scoring, const mt_run_options *options, const mt_tokenizer *tokenizer,
                    const char *tokenizer_path, mt_model_plan *plan, mt_error *error) {
    mt_scoring *s = mt_calloc(sizeof *s);
    *s = (mt_scoring){.options = options, .descriptor = -1};
    int status =
        mt_options_score_samples(options) ? open_samples(s, tokenizer, tokenizer_path, error) : open_tokens(s, error);
    if (status != 0) {
        mt_scoring_close(s);
        return -1;
    }
    if (options->max_sequences > 0) s->count = mt_min(s->count, options->max_sequences);
    s->at_once = mt_min(options->stack.micro_batch_size, s->count);
    int64_t tokens = mt_rank_tokens(&options->stack, s->at_once * s->longest);
    *plan = (mt_model_plan){.max_tokens = tokens, .max_logits = tokens, .max_position = s->longest};
    if (s->descriptor < 0) plan->max_patches = most_patches(s);
    *scoring = s;
    return 0;
}

void mt_scoring_close(mt_scoring *s) {
    if (!s) return;
    if (s->descriptor >= 0) close(s->descriptor);
    mt_samples_free(&s->samples);
    free(s->owners), free(s->scores), free(s);
}

/* Points `tokens` to a sequence's tokens, in `row` or in the samples; returns their number, or -1. */
static int64_t read_sequence(const mt_scoring *s, int64_t sequence, int32_t *row, const int32_t **tokens,
                             mt_error *error) {
    int64_t T = s->longest, bytes = (T + 1) * 4;
    if (s->descriptor < 0) {
        *tokens = s->samples.tokens + s->samples.offsets[sequence];
        return mt_sample_length(&s->samples, sequence) + 1;
    }
    if (mt_file_read_at(s->descriptor, row, bytes, sequence * bytes) != 0)
        return mt_file_read_error(error, s->options->score);
    for (int64_t i = 0; i <= T; i++)
        if (row[i] < 0 || row[i] >= s->options->stack.vocab_size)
            return mt_error_set(error,
                                "%s: token %d at position %lld of sequence %lld is outside the model's vocabulary of "
                                "%lld",
                                s->options->score, row[i], (long long)i, (long long)sequence,
                                (long long)s->options->stack.vocab_size);
    *tokens = row;
    return T + 1;
}

/* Appends a sequence to a batch: its tokens but the last, which is a label only. */
static void append_sequence(mt_batch *batch, const int32_t *tokens, int64_t count, int64_t number) {
    int64_t first = batch->num_tokens;
    batch->spans[batch->num_spans++] = (mt_span){first, count - 1, first, count - 1, true};
    for (int64_t i = 0; i + 1 < count; i++, batch->num_tokens++) {
        batch->tokens[first + i] = tokens[i], batch->labels[first + i] = tokens[i + 1];
        batch->loss_mask[first + i] = 1, batch->positions[first + i] = (int32_t)i;
        batch->token_index[first + i] = number << 32 | i;
    }
}

/* First sequence of a micro-batch of the round on a data-parallel rank, and their number, which may be 0. */
static int64_t batch_sequences(const mt_scoring *s, int64_t micro_batch, int64_t data_rank, int64_t *count) {
    int64_t ranks = mt_model_grid(s->model)->data.size,
            first = s->first + (micro_batch * ranks + data_rank) * s->at_once;
    *count = mt_max(mt_min(s->count - first, s->at_once), 0);
    return first;
}

/* The source of mt_score_tokens. A rank without sequences, or that cannot read them, scores one token: all ranks of a
 * layout work together. */
static int fill_batch(void *context, int64_t index, mt_batch *batch, mt_error *error) {
    static const int32_t none[2] = {0, 0};
    mt_scoring *s = context;
    int64_t count, first = batch_sequences(s, index, mt_model_grid(s->model)->data.rank, &count);
    int32_t *row = mt_malloc((s->longest + 1) * 4);
    batch->num_tokens = batch->num_spans = batch->images.num_images = 0;
    for (int64_t i = 0; i < count && s->status == 0; i++) {
        const int32_t *tokens = NULL;
        int64_t length = read_sequence(s, first + i, row, &tokens, error);
        if (length < 0 || mt_batch_append_images(batch, &s->samples, first + i, error) != 0)
            s->status = -1, s->error = *error;
        else
            append_sequence(batch, tokens, length, first + i);
    }
    free(row);
    if (batch->num_spans > 0 && s->status == 0) return 0;
    batch->num_tokens = batch->num_spans = batch->images.num_images = 0;
    append_sequence(batch, none, 2, 0);
    batch->token_index[0] = -1; // padding
    return 0;
}

/* ---- results */

static float *batch_scores(const mt_scoring *s, int64_t micro_batch) {
    return s->scores + micro_batch * s->at_once * s->longest * NUM_SCORES;
}

/* The sink of mt_score_tokens: keeps a micro-batch's scores, in the order of its tokens. */
static void keep_scores(void *context, int64_t micro_batch, const mt_batch *batch, const double *logp,
                        const double *entropy) {
    const mt_scoring *s = context;
    float *to = batch_scores(s, micro_batch);
    for (int64_t t = 0; t < mt_min(batch->num_tokens, s->at_once * s->longest); t++) {
        to[t * NUM_SCORES + RESULT] = (float)logp[t];
        to[t * NUM_SCORES + TOKEN_ENTROPY] = entropy ? (float)entropy[t] : 0;
    }
}

static json_t *json_scores(const float *scores, int64_t count, int which) {
    json_t *list = json_array();
    for (int64_t i = 0; i < count; i++)
        json_array_append_new(list, mt_json_real((double)scores[i * NUM_SCORES + which]));
    return list;
}

/* Writes the line of a sample. A number that is not finite becomes null. */
static int write_line(mt_scoring *s, int64_t sequence, const float *scores, mt_error *error) {
    const mt_samples *samples = &s->samples;
    mt_head_type head = s->options->stack.head_type;
    int64_t first = samples->offsets[sequence], count = mt_sample_length(samples, sequence), responses = 0;
    double logp = 0;
    json_t *line = json_object(), *tokens = json_array();
    for (int64_t i = 0; i < count + (head == MT_HEAD_LM); i++) // a value head has one position for each token
        json_array_append_new(tokens, json_integer(samples->tokens[first + i]));
    json_object_set_new(line, "tokens", tokens);
    for (int64_t i = 0; i < count; i++)
        if (samples->is_trained[first + i + 1]) logp += (double)scores[i * NUM_SCORES + RESULT], responses++;
    if (head == MT_HEAD_SEQUENCE) {
        json_object_set_new(line, "reward", mt_json_real((double)scores[(count - 1) * NUM_SCORES + RESULT]));
    } else if (head == MT_HEAD_TOKEN) {
        json_object_set_new(line, "values", json_scores(scores, count, RESULT));
    } else {
        json_object_set_new(line, "logprobs", json_scores(scores, count, RESULT));
        json_object_set_new(line, "entropies", json_scores(scores, count, TOKEN_ENTROPY));
        json_object_set_new(line, "logprob", mt_json_real(logp));
        mt_json_set_int(line, "count", responses);
    }
    char *text = json_dumps(line, JSON_COMPACT);
    json_decref(line);
    int status = mt_new_file_write(&s->out[RESULTS], text, (int64_t)strlen(text), error);
    if (status == 0) status = mt_new_file_write(&s->out[RESULTS], "\n", 1, error);
    free(text);
    return status;
}

static int write_sequence(mt_scoring *s, int64_t sequence, const float *scores, mt_error *error) {
    int64_t T = s->longest;
    if (s->descriptor < 0) return write_line(s, sequence, scores, error);
    float *column = mt_malloc(T * 4);
    int status = 0;
    for (int which = 0; which < NUM_SCORES && status == 0; which++) {
        for (int64_t t = 0; t < T; t++) column[t] = scores[t * NUM_SCORES + which];
        status = mt_new_file_write(&s->out[which == RESULT ? RESULTS : ENTROPY], column, T * 4, error);
    }
    free(column);
    return status;
}

/* Rank 0 receives a round's results and writes them, in the order of the file. */
static int write_round(mt_scoring *s, mt_error *error) {
    const mt_grid *grid = mt_model_grid(s->model);
    int64_t bytes = s->at_once * s->longest * NUM_SCORES * 4;
    float *received = mt_malloc(bytes);
    int status = 0, rank = grid->world.rank;
    for (int64_t i = 0, count; i < s->micro_batches; i++)
        for (int64_t data = 0; data < grid->data.size; data++) {
            int64_t first = batch_sequences(s, i, data, &count), at = 0;
            const float *scores = batch_scores(s, i);
            if (count == 0) continue;
            if (s->owners[data] == rank && rank != 0) mt_send(&grid->world, scores, bytes, 0);
            if (rank != 0) continue;
            if (s->owners[data] != 0) mt_receive(&grid->world, received, bytes, s->owners[data]), scores = received;
            for (int64_t k = 0; k < count && status == 0; k++) {
                status = write_sequence(s, first + k, scores + at * NUM_SCORES, error);
                at += s->descriptor < 0 ? mt_sample_length(&s->samples, first + k) : s->longest;
            }
        }
    free(received);
    return status;
}

/* The logits of the round, which is one micro-batch. */
static int write_logits(mt_scoring *s, mt_error *error) {
    int64_t count, V = s->options->stack.vocab_size;
    (void)batch_sequences(s, 0, 0, &count);
    float *logits = mt_malloc(mt_model_get_plan(s->model)->max_tokens * V * 4); // on every rank: all compute them
    mt_model_read(s->model, NULL, NULL, logits);
    int status = mt_new_file_write(&s->out[LOGITS], logits, count * s->longest * V * 4, error);
    free(logits);
    return status;
}

/* ---- the whole file */

/* True if two open outputs are one file, under any two names. Devices and pipes may be given twice. */
static bool same_file(const mt_new_file *a, const mt_new_file *b) {
    struct stat first, second;
    return a->stream && b->stream && fstat(fileno(a->stream), &first) == 0 && S_ISREG(first.st_mode) &&
           fstat(fileno(b->stream), &second) == 0 && first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

static int open_outputs(mt_scoring *s, mt_error *error) {
    const mt_run_options *o = s->options;
    const struct {
        const char *path, *option;
    } outputs[NUM_OUTPUTS] = {[RESULTS] = {o->out, "--out"},
                              [ENTROPY] = {o->entropy_out, "--entropy-out"},
                              [LOGITS] = {o->logits_out, "--logits-out"}};
    int status = 0;
    for (int i = 0; i < NUM_OUTPUTS && status == 0; i++) {
        if (outputs[i].path && mt_path_same(o->score, outputs[i].path))
            status =
                mt_error_set(error, "--score and %s name one file, %s; give each its own", outputs[i].option, o->score);
        else if (outputs[i].path)
            status = mt_new_file_open(&s->out[i], outputs[i].path, outputs[i].option, error);
        for (int j = 0; j < i && status == 0; j++)
            if (same_file(&s->out[i], &s->out[j]))
                status = mt_error_set(error, "%s and %s name one file, %s; give each its own", outputs[j].option,
                                      outputs[i].option, outputs[i].path);
    }
    for (int i = 0; i < NUM_OUTPUTS && status == 0; i++)
        if (outputs[i].path) mt_new_file_note(outputs[i].path, outputs[i].option);
    return status;
}

/* Scores all sequences in rounds, each a few micro-batches on every data-parallel rank. */
static int score_rounds(mt_scoring *s, mt_error *error) {
    const mt_grid *grid = mt_model_grid(s->model);
    int64_t per_slot = s->at_once * grid->data.size, per_round = s->options->logits_out ? 1 : 4 * grid->pipeline.size;
    int status = 0;
    mt_batch batch;
    mt_batch_alloc(&batch, mt_model_get_plan(s->model)->max_tokens * grid->context.size);
    if (mt_model_get_plan(s->model)->max_patches > 0)
        mt_batch_alloc_images(&batch, &s->options->stack, mt_model_get_plan(s->model)->max_patches);
    s->scores = mt_malloc(per_round * s->at_once * s->longest * NUM_SCORES * 4);
    for (s->first = 0; s->first < s->count && status == 0; s->first += s->micro_batches * per_slot) {
        s->micro_batches = mt_min(per_round, mt_divide_up(s->count - s->first, per_slot));
        status = mt_score_tokens(s->model, s->micro_batches, fill_batch, s, &batch, keep_scores, s, error);
        if (status == 0 && s->status != 0) status = s->status, *error = s->error;
        status = mt_agree(&grid->world, status != 0, error);
        if (status == 0) status = write_round(s, error);
        if (status == 0 && s->options->logits_out) status = write_logits(s, error);
        status = mt_agree(&grid->world, status != 0, error); // rank 0's disk may be full
    }
    mt_batch_free(&batch);
    return status;
}

int64_t mt_scoring_run(mt_scoring *s, mt_model *model, int64_t *tokens, mt_error *error) {
    const mt_group *world = &mt_model_grid(model)->world;
    s->model = model, *tokens = 0;
    s->owners = mt_grid_owners(mt_model_grid(model));
    int status = world->rank == 0 ? open_outputs(s, error) : 0;
    status = mt_agree(world, status != 0, error);
    if (status == 0) status = score_rounds(s, error);
    for (int i = 0; i < NUM_OUTPUTS; i++) status = mt_new_file_close(&s->out[i], status, error);
    for (int64_t i = 0; i < s->count; i++) *tokens += s->descriptor < 0 ? mt_sample_length(&s->samples, i) : s->longest;
    return mt_agree(world, status != 0, error) == 0 ? s->count : -1;
}
