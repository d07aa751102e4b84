/* sft.h: samples for fine-tuning, sequences of any length in memory.
 *
 *   chat.c      conversations -> tokens, by chat templates
 *   sft.c       JSON Lines of conversations, prompts with responses, or texts -> tokens to train on
 *   packing.c   samples -> rows of at most --seq-length tokens; rows -> micro-batches with even work
 */
#ifndef MT_SFT_H
#define MT_SFT_H

#include "../tokens/tokenizer.h"
#include "image_chat.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A prompt's text, or that of the last user message, and the answer that a reward compares with; NULL: none. Each text
 * ends with a 0 that is not counted. */
typedef struct mt_question {
    char *prompt, *answer;
    int64_t prompt_bytes, answer_bytes;
    char *conversation; // {"messages": [...], "tools": [...], "chat_template_kwargs": {...}}; NULL: not kept
    int64_t share;      // of --prompt-shares: which one
    int64_t teacher;    // of --teachers: which one
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
    /* of an encoder-decoder: inputs of sample s are [input_offsets[s], input_offsets[s + 1]); else NULL */
    int64_t *input_offsets; // [count + 1]
    int32_t *inputs;
    int64_t input_length, target_length; // the most of a sample, of inputs and of positions
    /* of a model with a vision tower: sample s has the pictures [image_offsets[s], image_offsets[s + 1]); else NULL */
    int64_t *image_offsets; // [count + 1]
    mt_images images;
    mt_image_config image_config;
} mt_samples;

/* Frees the arrays. */
void mt_samples_free(mt_samples *samples);

/* The files of samples and how they are read. */
typedef struct mt_sft_config {
    mt_strings paths;           // JSON Lines or Parquet, read in this order
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
    int64_t input_length;   // of an encoder-decoder: the most inputs; lines hold an input and a target. 0: none
    int64_t end_id;         // of an encoder-decoder: after an input and a target; -1: nothing. Before a target stands 0
    bool ref_logps;         // pairs have the log-probabilities by the reference model; they cannot be truncated
    bool prompts;           // lines hold prompts for responses by a model; sequences have 1 token or more
    const char *answer_key; // NULL: answer, ground_truth or reward_model.ground_truth
    bool needs_answer;      // a prompt without an answer is bad
    bool conversations;     // mt_question.conversation is kept
    char *image_key, *image_folder; // with `images`: NULL: "images" or "image"; the folder of the file
    const mt_image_reader *images;  // how pictures are read, relative paths in the folder of the file; NULL: lines with
                                    // pictures are bad
    mt_strings shares;              // --prompt-shares; prompts whose tags are in none are left out. Empty: all are kept
    const char *tag_key;            // NULL: tag
    mt_strings teachers;     // --teachers, KEY=FOLDER; a prompt without one of these keys is bad. Empty: 0 for all
    const char *teacher_key; // NULL: data_source
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
 * A list of messages may be a text in JSON (ROLL), or be called "conversations", with "from" and "value" (ShareGPT). A
 * line may have a "system" text, and beside a prompt a "history" of pairs of texts (Alpaca). A response may be a whole
 * conversation that holds the prompt, which is then written once. A message of the assistant with one of the marks
 * "weight", "loss_weight", "loss", "train", "training" and "trainable" that is 0 or false is not trained on. Fields
 * that would make another sample of a line and are not supported are errors; others that are not read are named in the
 * log.
 *
 * With `images` the content of a message may have pictures, and a list "images" may stand beside the messages
 * (mt_images_take). They are decoded once, so that a bad one is an error of its line, and kept as paths. No image token
 * is trained on, and a sample that loses a picture by --seq-length is bad.
 *
 *   {"input": "...", "target": "..."} with `input_length`; each may be a list of tokens, which is taken as it is. A
 *   longer one is cut off, and ends with end_id, or the line is left out
 *   {"prompt": "...", "answer": "..."} with `prompts`; the prompt may be a list of messages, or "messages"; the answer
 * a number. Samples are the tokens up to the header of the response; those above seq_length are left out
 *
 * A key "a.b" is that of the field b in the object a. Blank lines are skipped. A file may also be one JSON list of such
 * objects, or one of Parquet, whose rows are such objects (parquet.h). Errors: a file that cannot be read; more bad
 * lines than skip_bad_samples, with the file and the line of the first; a token outside the vocabulary; no sample at
 * all. */
int mt_samples_read(mt_samples *samples, const mt_sft_config *config, const mt_tokenizer *tokenizer, mt_error *error);

/* A number that equal samples share, for mt_fingerprints_agree. */
uint64_t mt_samples_fingerprint(const mt_samples *samples);

#ifdef __cplusplus
}
#endif
#endif
