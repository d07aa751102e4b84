/* sft.h: samples for fine-tuning, sequences of any length in memory.
 *
 *   chat.c      conversations -> tokens, by chat templates
 *   sft.c       JSON Lines of conversations, prompts with responses, or texts -> tokens to train on
 *   packing.c   samples -> rows of at most --seq-length tokens; rows -> micro-batches with even work
 */
#ifndef MT_SFT_H
#define MT_SFT_H

#include "dataset.h"
#include "../tokens/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A prompt's text, or that of the last user message, and the answer that a reward compares with; NULL: none. Each text
 * ends with a 0 that is not counted. */
typedef struct mt_question {
    char *prompt, *answer;
    int64_t prompt_bytes, answer_bytes;
    int64_t share; // of --prompt-shares: which one
} mt_question;

/* Sequences one after another. Sample s has the tokens [offsets[s], offsets[s + 1]): inputs are all but its last token,
 * labels all but its first, so it takes offsets[s + 1] - offsets[s] - 1 >= 1 positions of a micro-batch. */
typedef struct mt_samples {
    int64_t count;
    int64_t *offsets;       // [count + 1]
    int32_t *tokens;        // [offsets[count]]
    uint8_t *is_trained;    // [offsets[count]]: the loss counts the prediction of this token
    bool pairs;             // samples 2i and 2i + 1 are one item of a row: a chosen and a rejected response
    mt_question *questions; // [count] if samples are prompts; else NULL
    double *ref_logps;      // [count] or NULL: log-probability of the trained tokens by the reference model
} mt_samples;

/* Items of rows: samples, or pairs of them. Below, the "sample" of a row, a piece or a plan is an item. */
int64_t mt_samples_items(const mt_samples *samples);

/* Frees the arrays. */
void mt_samples_free(mt_samples *samples);

/* The files of samples and how they are read. */
typedef struct mt_sft_config {
    mt_strings paths;           // JSON Lines, read in this order
    const char *tokenizer_path; // file or folder of the tokenizer; NULL: none
    int64_t vocab_size;         // tokens must be below it
    int64_t seq_length;         // positions of the longest sample
    mt_chat_template chat_template;
    const char *chat_template_kwargs; // JSON; NULL: none
    mt_loss_on loss_on;
    mt_long_samples long_samples;
    int64_t skip_bad_samples; // bad lines that are left out; one more is an error
    // Keys of the fields; NULL: messages; prompt or instruction; input; response or output
    const char *messages_key, *prompt_key, *query_key, *response_key;
    bool masks_eod; // no token behind eod_id is trained on (--eod-mask-loss)
    int64_t eod_id;
    bool refuses_long; // a longer sample is an error, whatever long_samples says
    bool scores;       // for infer --score: messages name its ways out
    bool whole;        // the last token is an input too, as a value head needs: an untrained token 0 follows it
    bool pairs;        // lines hold a chosen and a rejected response: samples 2i and 2i + 1. Else such lines are bad
    const char *chosen_key, *rejected_key; // NULL: chosen, rejected
    bool ref_logps;         // pairs have the log-probabilities by the reference model; they cannot be truncated
    bool prompts;           // lines hold prompts for responses by a model; sequences have 1 token or more
    const char *answer_key; // NULL: answer
    bool needs_answer;      // a prompt without an answer is bad
    mt_strings shares;      // --prompt-shares; prompts whose tags are in none are left out. Empty: all are kept
    const char *tag_key;    // NULL: tag
    /* An error if the reward cannot compare with an answer, which makes the prompt bad; NULL: it can with any. */
    int (*check_answer)(const char *answer, int64_t bytes, mt_error *error);
    FILE *log; // skipped lines and a summary are printed here; NULL: nowhere
} mt_sft_config;

/* Reads all samples of the files into memory; free them, but not after an error. `tokenizer` may be NULL if every line
 * has tokens. A line of JSON is one of
 *
 *   {"messages": [{"role": "user", "content": "..."}, ...]}
 *   {"prompt": "...", "response": "..."}, also with keys instruction, input and output, as in Alpaca
 *   {"text": "..."} or {"tokens": [...]}, which is trained on as a whole
 *   {"prompt": "...", "chosen": "...", "rejected": "..."} with `pairs`; the three may be lists of messages, and the
 *   prompt may be missing; with `ref_logps` also ref_chosen_logp and ref_rejected_logp, which TRL calls
 *   ref_chosen_logps or reference_chosen_logps
 * A list of messages may be called "conversations", with "from" and "value" (ShareGPT). A line may have a "system"
 * text, and beside a prompt a "history" of pairs of texts (Alpaca). A response may be a whole conversation that holds
 * the prompt, which is then written once. A message of the assistant with one of the marks "weight", "loss_weight",
 * "loss", "train", "training" and "trainable" that is 0 or false is not trained on. Fields that would make another
 * sample of a line and are not supported are errors; others that are not read are named in the log.
 *
 *   {"prompt": "...", "answer": "..."} with `prompts`; the prompt may be a list of messages, or "messages"; the answer
 * a number. Samples are the tokens up to the header of the response; those above seq_length are left out
 *
 * Blank lines are skipped. A file may also be one JSON list of such objects. Errors: a file that cannot be read; more
 * bad lines than skip_bad_samples, with the file and the line of the first; a token outside the vocabulary; no sample
 * at all. */
int mt_samples_read(mt_samples *samples, const mt_sft_config *config, const mt_tokenizer *tokenizer, mt_error *error);

/* A number that equal samples share, for mt_fingerprints_agree. */
uint64_t mt_samples_fingerprint(const mt_samples *samples);

/* ---- rows (packing.c) --------------------------------------------------------------------------------------------
 *
 * With packing, one sample of the run (--global-batch-size, consumed_train_samples) is one row: samples one after
 * another, at most --seq-length positions. Without packing a row is one sample. A row is a pure function of the
 * samples, the seed and its number, so every layout reads the same rows, and a resumed run goes on with the next one.
 */

/* The rows of an epoch: row r has the samples order[first[r]] ... order[first[r + 1] - 1]. */
typedef struct mt_rows {
    int64_t count;
    int64_t *first; // [count + 1]
    int64_t *order; // [samples]
} mt_rows;

/* Shuffles samples of `lengths` [count] by seed and epoch, then packs each `window` of them in turn by best-fit
 * decreasing into rows of at most `row_length` (Johnson, "Fast algorithms for bin packing"), and shuffles these rows.
 * window 1: one sample a row. No length exceeds row_length. Free the rows. */
void mt_rows_pack(mt_rows *rows, const int64_t *lengths, int64_t count, int64_t row_length, int64_t window,
                  int64_t seed, int64_t epoch);
void mt_rows_free(mt_rows *rows);

/* Positions of an item. */
int64_t mt_sample_length(const mt_samples *samples, int64_t item);

/* A length with a log-normal distribution around `median`, at most `longest` and at least 1: a pure function of key and
 * index. Megatron's mock data for fine-tuning has this distribution too. */
int64_t mt_lognormal_length(uint64_t key, int64_t index, int64_t median, double sigma, int64_t longest);

/* Samples for --mock-data: `count` log-normal lengths around seq_length / 32 with a sigma of MT_MOCK_SIGMA, at most
 * seq_length. Each sample counts upwards from a random token, a rejected one downwards; the first quarter is a prompt,
 * without loss. */
#define MT_MOCK_SIGMA 1.3
void mt_samples_mock(mt_samples *samples, int64_t count, const mt_data_config *config, mt_split split);

/* A dataset of rows of the samples [begin, end), which must stay open: its num_samples are rows, and it has no `get`.
 * With config->train_epochs, a training split ends after that many epochs. */
mt_dataset *mt_row_dataset_create(const mt_samples *samples, int64_t begin, int64_t end, mt_split split,
                                  const mt_data_config *config);

/* The rows of a dataset that mt_row_dataset_create made (mt_dataset.packing). Rows after its last have no sample. */
typedef struct mt_packing mt_packing;

/* The samples that a packing's rows are made of. */
const mt_samples *mt_packing_samples(const mt_packing *packing);

/* Points `order` to the samples of row `row` of the run; returns their number. Valid until the next call. */
int64_t mt_packing_row(mt_packing *packing, int64_t row, const int64_t **order);

/* Rows of the run, if its data end; else INT64_MAX. */
int64_t mt_packing_last(const mt_packing *packing);

/* Rows of the first `epochs` epochs. */
int64_t mt_packing_count(mt_packing *packing, int64_t epochs);

/* ---- the micro-batches of a step (packing.c) ---------------------------------------------------------------------
 *
 * A step trains on the same rows on every layout. Which rank computes which of their samples, and in which
 * micro-batch, is chosen so that the predicted work of all ranks is even; the loss is a sum over tokens divided by the
 * step's number of tokens, so this choice does not change it.
 */

/* A sample in the run: sample number, positions, and token index (mt_batch) of its first position, which is row *
 * seq_length + offset in the row. */
typedef struct mt_piece {
    int64_t sample, length, token_index;
} mt_piece;

/* A micro-batch has the pieces [first, first + count). */
typedef struct mt_plan_batch {
    int64_t first, count;
    int64_t num_tokens;   // positions of its pieces, without padding
    int64_t context_size; // ranks that share it, with dynamic context parallelism; else 0
    double work;          // predicted, of each of these ranks
} mt_plan_batch;

/* The micro-batches of a step. Rank r computes batches[batch_of[slot * num_ranks + r]] in each slot in turn. Ranks are
 * data-parallel ranks. */
typedef struct mt_step_plan {
    int64_t num_slots, num_ranks, num_pieces, num_batches;
    mt_piece *pieces;
    mt_plan_batch *batches;
    int64_t *batch_of; // [num_slots, num_ranks]
} mt_step_plan;
void mt_step_plan_free(mt_step_plan *plan);

/* The sizes of a plan. */
typedef struct mt_plan_shape {
    int64_t num_ranks, micro_batch_size; // data-parallel ranks; rows of a micro-batch
    int64_t row_length;                  // --seq-length
    bool pads;                           // every row is padded to row_length
    bool regroups;                       // micro-batches hold any samples that fit in their rows, not whole rows
    bool in_order;                       // rows are dealt in order, without regard to their work
    mt_token_work work;

    /* dynamic context parallelism */
    int64_t context_size, min_context_size; // ranks of the largest and the smallest block; powers of two
    int64_t rank_tokens;                    // tokens of a micro-batch on each of its ranks, at most
    bool meets;                             // all ranks wait for one another in each slot, as with experts

    /* interleaved pipelines, where the number of slots is not given */
    int64_t slot_group, slot_rest; // slots are groups of slot_group, and at least slot_rest more or none
} mt_plan_shape;

/* The smallest number of slots, at least `least`, that the pipeline's schedule can run. */
int64_t mt_step_plan_slots(const mt_plan_shape *shape, int64_t least);

/* Plans the step of `num_rows` rows, a multiple of num_ranks * micro_batch_size; row r has the `pieces`
 * [first[r], first[r + 1]). Each rank gets the same number of rows; with `regroups`, samples that fit in as many. Free
 * the plan. */
void mt_step_plan_balance(mt_step_plan *plan, const mt_piece *pieces, const int64_t *first, int64_t num_rows,
                          const mt_plan_shape *shape);

/* Dynamic context parallelism. Plans a step whose ranks are all num_ranks = data-parallel x context-parallel ranks,
 * with context-parallel ranks as neighbours. In each slot the ranks are divided into aligned blocks of 2^k neighbours,
 * and the ranks of a block share a batch. A sample gets the smallest block that has memory for it and computes it in
 * about the time of the slot; blocks of one size have even work. `pieces` [count] fit in context_size * rank_tokens
 * each. A pure function of the lengths. Free the plan. */
void mt_step_plan_solve(mt_step_plan *plan, const mt_piece *pieces, int64_t count, const mt_plan_shape *shape);

/* Predicted work of each of `size` ranks that share samples of `tokens` tokens and `pairs` pairs (sums of lengths and
 * of their squares): each computes its share, and receives the keys and values of all other ranks. */
double mt_shared_work(const mt_token_work *work, double tokens, double pairs, int64_t size);

/* The time of a plan in predicted work: blocks begin when their ranks have finished the slots before; with `meets`,
 * when all ranks have. start[num_batches]: when each batch begins; NULL: not wanted. */
double mt_step_plan_time(const mt_step_plan *plan, bool meets, double *start);

/* Predicted work of the slowest rank divided by the mean of all ranks, minus 1. */
double mt_step_plan_imbalance(const mt_step_plan *plan);

/* Fills `batch` with a micro-batch of a plan: a causal span and positions from 0 for each sample, then the masked
 * tokens of mt_batch_pad up to `num_tokens` in all (0: none, except one token where there is no sample). With ref_logps
 * of the samples also MT_REF_LOGP: the sum on the last trained token of a sample, 0 on the others. */
void mt_step_plan_fill(const mt_step_plan *plan, int64_t slot, int64_t rank, const mt_samples *samples,
                       int64_t num_tokens, mt_batch *batch);

#ifdef __cplusplus
}
#endif
#endif
