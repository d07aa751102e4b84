/* picture_prompts.h: pictures in the prompts and messages of infer. Every rank calls each function, and gets the same
 * status. */
#ifndef MT_PICTURE_PROMPTS_H
#define MT_PICTURE_PROMPTS_H

#include "inference.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How the model's pictures are read. A model without a vision tower has no reader, and an error only with --image. */
int mt_inference_open_pictures(mt_inference *run, mt_error *error);

/* Appends the tokens of a prompt with the pictures of --image, a user's message, up to the header of the response. */
int mt_inference_encode_shown(mt_inference *run, const char *text, mt_ids *ids, mt_images *images, mt_error *error);

/* --chat: a picture goes with the next message. Errors: the file is no picture, or the model takes none. */
int mt_inference_show(mt_inference *run, const char *path, mt_error *error);

/* The same for a line "/image FILE", which is no message: 1; 0: another line; -1: an error. */
int mt_inference_show_line(mt_inference *run, const char *line, int64_t bytes, mt_error *error);

/* Gives the pictures that wait for a message to message `message`; removes the pictures of messages from `count` on;
 * gives those of message `from` to message `to`, and removes all others. */
void mt_inference_give_shown(mt_inference *run, int64_t message);
void mt_inference_cut_shown(mt_inference *run, int64_t count);
void mt_inference_move_shown(mt_inference *run, int64_t from, int64_t to);

/* Appends the tokens of the conversation and its pictures, up to the header of the response. */
int mt_inference_encode_talk(mt_inference *run, mt_ids *ids, mt_images *images, mt_error *error);

/* Gives a sequence the pictures of its tokens, which live until mt_inference_forget_pictures. Errors: in a conversation
 * more image tokens than --max-image-tokens. */
int mt_inference_attach(mt_inference *run, mt_sequence *sequence, mt_images *images, mt_error *error);
/* The same for the pictures of line `i` of --prompts. */
int mt_inference_attach_line(mt_inference *run, mt_sequence *sequence, const mt_samples *prompts, int64_t i,
                             mt_error *error);
void mt_inference_forget_pictures(mt_inference *run);

/* Sets the plan's sizes for pictures: of the sequences at hand, or for a conversation or a server of
 * --max-image-tokens. */
void mt_inference_plan_pictures(const mt_inference *run, mt_model_plan *plan);

#ifdef __cplusplus
}
#endif
#endif
