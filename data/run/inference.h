/* inference.h: start and end of a run of infer, and the sources of its prompts. Every rank calls each
 * function; a function without a status ends the program with one line of error if something is wrong on any rank. */
#ifndef MT_INFERENCE_H
#define MT_INFERENCE_H

#include "../models/text_images.h"
#include "../tokens/chat.h"
#include "../tokens/response.h"
#include "../tokens/tokenizer.h"
#include "../options/options.h"
#include "../datasets/sft.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A picture of a conversation. */
typedef struct mt_shown {
    int64_t message; // of the conversation; -1: the next one
    char *path;
} mt_shown;

typedef struct mt_inference {
    mt_run_options options;
    mt_grid grid;
    bool is_first;           // of the ranks: the one that talks
    char *folder;            // holds config.json
    char *tokenizer_folder;  // the model's or its adapter's
    mt_tokenizer *tokenizer; // NULL: token ids in, token ids out
    mt_error no_tokenizer;   // why the model's folder gives none, with --score
    const char *tokenizer_path;
    int32_t bos;        // begins the model's texts; -1: none
    int64_t context;    // tokens of a sequence at most
    int64_t max_inputs; // of an encoder-decoder: the most tokens for the encoder of the sequences to come
    mt_model *model;
    mt_generator *generator;
    mt_responses responses; // the texts of the sequences at hand
    mt_chat *chat;          // --chat, else NULL
    mt_conversation conversation;
    /* pictures, of a model that takes them: see picture_prompts.h */
    bool takes_pictures;
    bool has_many_pictures; // the conversation at hand has more than --max-image-tokens
    mt_image_reader reader;
    mt_shown *shown; // [num_shown] of the conversation
    int64_t num_shown, shown_capacity;
    mt_text_images **texts; // [num_texts] of the sequences at hand
    int64_t num_texts;
    int64_t most_image_tokens, all_image_tokens, most_patches; // of a text, of all, of a picture
} mt_inference;

/* Opens ranks, grid and folder. Returns false if --print-config was asked for, which is done then. */
bool mt_inference_open(mt_inference *run, int *argc, char ***argv);
void mt_inference_close(mt_inference *run);

/* Ends the program if a function failed on any rank. */
void mt_inference_check(mt_inference *run, int status, mt_error *error);

/* The tokenizer that options name, or else the model's. */
void mt_inference_open_tokenizer(mt_inference *run);

/* The model of --load, with memory for the plan; or with a generator, for `prompts` prompts of prompt_tokens tokens in
 * all, and sequences of at most max_tokens tokens. */
void mt_inference_open_model(mt_inference *run, mt_model_plan *plan);
void mt_inference_open_generator(mt_inference *run, int64_t prompts, int64_t max_tokens, int64_t prompt_tokens);

/* The prompts of the file --prompts, the same on every rank. */
mt_samples mt_inference_read_prompts(mt_inference *run);

/* Begin a sequence: from prompt `i` of --prompts, --prompt or --prompt-tokens; from the prompt of `first`, whose
 * pictures it shares; or from a text of some bytes. Errors: no text that the tokenizer can encode, a prompt that fills
 * the context. */
int mt_inference_begin_prompt(mt_inference *run, const mt_samples *prompts, int64_t i, mt_sequence *sequence,
                              int64_t id, mt_error *error);
int mt_inference_begin_sample(const mt_inference *run, const mt_sequence *first, mt_sequence *sequence, int64_t id,
                              mt_error *error);
int mt_inference_begin_text(const mt_inference *run, mt_sequence *sequence, int64_t id, const char *text, int64_t bytes,
                            mt_error *error);

/* --chat. A turn begins with a message of the user; if the conversation no longer fits in the context, it starts again
 * with this message. At the end of the turn the response becomes a message. */
void mt_inference_open_chat(mt_inference *run);
int mt_inference_begin_turn(mt_inference *run, mt_sequence *sequence, int64_t id, const char *line, int64_t bytes,
                            mt_error *error);
void mt_inference_end_turn(mt_inference *run, const mt_sequence *sequence);

/* The next line of standard input without its end, for every rank, to free, and its bytes; NULL at the end. A zero byte
 * is a byte like others. */
char *mt_inference_next_line(mt_inference *run, int64_t *bytes);

#ifdef __cplusplus
}
#endif
#endif
