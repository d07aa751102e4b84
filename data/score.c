/* score.c: log-probabilities of the tokens in a file. */
#include "score.h"

#include "file.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* The files that are written. A stream is NULL where no file is wanted, and on all ranks but the first. */
enum { LOG_PROBS, ENTROPY, LOGITS, NUM_OUTPUTS };

/* Opens the sequences to score and counts them. */
static FILE *open_sequences(const mt_options *o, int64_t *num_sequences, mt_error *error) {
    int64_t bytes, bytes_each = (o->seq_length + 1) * 4;
    int descriptor = mt_file_open(o->score, &bytes, error);
    if (descriptor < 0) return NULL;
    FILE *file = fdopen(descriptor, "rb");
    MT_CHECK(file);
    *num_sequences = bytes / bytes_each;
    if (bytes == 0 || bytes % bytes_each != 0) {
        mt_error_set(error,
                     "%s: %lld bytes are not whole sequences of --seq-length %lld + 1 int32 tokens (%lld bytes each); "
                     "give the --seq-length that the file was made for",
                     o->score, (long long)bytes, (long long)o->seq_length, (long long)bytes_each);
        fclose(file);
        return NULL;
    }
    if (o->max_sequences > 0 && o->max_sequences < *num_sequences) *num_sequences = o->max_sequences;
    return file;
}

/* Sequences per forward. */
static int64_t batch_size(const mt_options *o, int64_t num_sequences) {
    return o->micro_batch_size < num_sequences ? o->micro_batch_size : num_sequences;
}

int mt_score_plan(mt_model_plan *plan, const mt_options *o, mt_error *error) {
    int64_t num_sequences;
    FILE *file = open_sequences(o, &num_sequences, error);
    if (!file) return -1;
    fclose(file);
    int64_t tokens = batch_size(o, num_sequences) * o->seq_length;
    *plan = (mt_model_plan){.max_tokens = tokens, .max_logits = tokens, .max_position = o->seq_length};
    return 0;
}

/* Reads sequences [first, first + count) into a batch. `row` is scratch for one of them. */
static int read_batch(mt_batch *batch, FILE *file, int64_t first, int64_t count, int32_t *row, const mt_options *o,
                      mt_error *error) {
    int64_t T = o->seq_length;
    for (int64_t s = 0; s < count; s++) {
        if ((int64_t)fread(row, 4, (size_t)(T + 1), file) != T + 1)
            return mt_error_set(error, "%s: cannot be read: %s", o->score,
                                ferror(file) ? strerror(errno) : "it became shorter while it was read");
        for (int64_t i = 0; i <= T; i++)
            if (row[i] < 0 || row[i] >= o->vocab_size)
                return mt_error_set(error,
                                    "%s: token %d at position %lld of sequence %lld is outside the model's vocabulary "
                                    "of %lld",
                                    o->score, row[i], (long long)i, (long long)(first + s), (long long)o->vocab_size);
        for (int64_t i = 0, t = s * T; i < T; i++, t++) {
            batch->tokens[t] = row[i];
            batch->labels[t] = row[i + 1];
            batch->loss_mask[t] = 1;
            batch->positions[t] = (int32_t)i;
            batch->token_index[t] = (first + s) * T + i;
        }
        batch->spans[s] = (mt_span){s * T, T, s * T, T, true};
    }
    batch->num_tokens = count * T;
    batch->num_spans = count;
    return 0;
}

/* True if two open outputs are one file, under any two names. Devices and pipes may be given twice. */
static bool same_file(const mt_new_file *a, const mt_new_file *b) {
    struct stat first, second;
    return a->stream && b->stream && fstat(fileno(a->stream), &first) == 0 && S_ISREG(first.st_mode) &&
           fstat(fileno(b->stream), &second) == 0 && first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

/* Scores the open file, a batch at a time, into the open outputs. */
static int score_batches(mt_model *model, FILE *file, int64_t num_sequences, mt_new_file *out, mt_error *error) {
    const mt_options *o = mt_model_options(model);
    const mt_group *world = &mt_model_grid(model)->world;
    int64_t T = o->seq_length, at_once = batch_size(o, num_sequences), tokens = at_once * T;
    mt_batch batch;
    mt_batch_alloc(&batch, tokens);
    int32_t *row = mt_malloc((T + 1) * 4);
    float *logp = mt_malloc(tokens * 4), *entropy = mt_malloc(tokens * 4);
    float *logits = o->logits_out ? mt_malloc(tokens * o->vocab_size * 4) : NULL; // on every rank: all compute them
    int status = 0;
    for (int64_t first = 0; first < num_sequences && status == 0; first += at_once) {
        int64_t count = num_sequences - first < at_once ? num_sequences - first : at_once;
        status = mt_agree(world, read_batch(&batch, file, first, count, row, o, error) != 0, error);
        if (status != 0) break;
        mt_model_forward(model, &batch, false);
        mt_model_read(model, logp, entropy, logits);
        status = mt_new_file_write(&out[LOG_PROBS], logp, count * T * 4, error);
        if (status == 0) status = mt_new_file_write(&out[ENTROPY], entropy, count * T * 4, error);
        if (status == 0) status = mt_new_file_write(&out[LOGITS], logits, count * T * o->vocab_size * 4, error);
        status = mt_agree(world, status != 0, error); // rank 0's disk may be full
    }
    free(row);
    free(logp);
    free(entropy);
    free(logits);
    mt_batch_free(&batch);
    return status;
}

int64_t mt_score(mt_model *model, mt_error *error) {
    const mt_options *o = mt_model_options(model);
    const mt_group *world = &mt_model_grid(model)->world;
    const struct {
        const char *path, *option;
    } outputs[NUM_OUTPUTS] = {[LOG_PROBS] = {o->out, "--out"},
                              [ENTROPY] = {o->entropy_out, "--entropy-out"},
                              [LOGITS] = {o->logits_out, "--logits-out"}};
    mt_new_file out[NUM_OUTPUTS] = {{0}};
    int64_t num_sequences = 0;
    FILE *file = open_sequences(o, &num_sequences, error);
    int status = file ? 0 : -1;
    for (int i = 0; i < NUM_OUTPUTS && status == 0 && world->rank == 0; i++) {
        if (outputs[i].path && mt_path_same(o->score, outputs[i].path))
            status =
                mt_error_set(error, "--score and %s name one file, %s; give each its own", outputs[i].option, o->score);
        else if (outputs[i].path)
            status = mt_new_file_open(&out[i], outputs[i].path, outputs[i].option, error);
        for (int j = 0; j < i && status == 0; j++)
            if (same_file(&out[i], &out[j]))
                status = mt_error_set(error, "%s and %s name one file, %s; give each its own", outputs[j].option,
                                      outputs[i].option, outputs[i].path);
    }
    status = mt_agree(world, status != 0, error);
    if (status == 0) status = score_batches(model, file, num_sequences, out, error);
    for (int i = 0; i < NUM_OUTPUTS; i++) status = mt_new_file_close(&out[i], status, error);
    if (file) fclose(file);
    return mt_agree(world, status != 0, error) == 0 ? num_sequences : -1;
}
