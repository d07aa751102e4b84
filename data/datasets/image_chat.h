/* image_chat.h: conversations with pictures, as tokens and pictures.
 *
 *   messages -> their pictures, and parts of type text and image
 *   parts    -> tokens by the folder's chat template (chat.h), with one image token for a picture
 *            -> as many image tokens for a picture as it has merged patches
 */
#ifndef MT_IMAGE_CHAT_H
#define MT_IMAGE_CHAT_H

#include "../options/options.h"
#include "../tokens/chat.h"
#include "images.h"

#include <jansson.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The place of a picture in a text, as in LLaMA-Factory, verl and ROLL. */
#define MT_IMAGE_MARK "<image>"

/* A picture that a conversation names. */
typedef struct mt_image {
    char *source;         // the path of a PNG or JPEG, or data:image/...;base64,...
    mt_image_grid grid;   // its patches; {0, 0} before mt_images_expand
    uint64_t fingerprint; // of the file's bytes
} mt_image;

/* Pictures in the order of their image tokens. Start it as {0}. */
typedef struct mt_images {
    mt_image *items;
    int64_t count, capacity;
    bool borrows; // the sources are another list's, which outlives this one
} mt_images;

/* Removes the pictures from `count` on; with 0 also the array. */
void mt_images_cut(mt_images *images, int64_t count);

/* Moves all pictures of `from` to the end of `images`. */
void mt_images_move(mt_images *images, mt_images *from);

/* Appends pictures [first, first + count) of `from`, and borrows their sources: `images` has no others. */
void mt_images_borrow(mt_images *images, const mt_images *from, int64_t first, int64_t count);

/* The same with copies of the sources. */
void mt_images_copy(mt_images *images, const mt_images *from, int64_t first, int64_t count);

/* How pictures of conversations are read. */
typedef struct mt_image_reader {
    mt_image_config config;
    int64_t image_token_id;
    const char *folder; // where relative paths of mt_image_chat_encode begin; NULL: the working directory
} mt_image_reader;

/* The tower of the options, with the processor's file beside the tokenizer, whose file or folder is `tokenizer` (NULL:
 * none), and the pixels of --image-min-pixels and --image-max-pixels. Errors: a model without a tower; those of
 * mt_image_config_read; more pixels at least than at most. */
int mt_image_reader_open(mt_image_reader *reader, const mt_run_options *options, const char *tokenizer,
                         mt_error *error);

/* Appends the pictures of messages to `images`, and leaves parts without paths, {"type": "text", "text": ...} and
 * {"type": "image"}, which templates take. A message's "content" (or "value") may be a list of such parts, where a
 * picture is one of
 *
 *   {"type": "image", "image": PATH}, also with "path", "url"
 *   {"type": "image_url", "image_url": {"url": "file://PATH"}}, or the text of the address itself
 *   {"type": "image"}, the next one of `beside`
 *
 * or, with `beside`, a text with <image> for each picture of the list. `beside` is a list of PATHs or of objects as
 * above, or one of these alone; NULL: none. A PATH may also be file://PATH, or a picture of data:...;base64,; it begins
 * in `folder`, or with NULL in the working directory. Errors: parts of other types; addresses of a network; more or
 * fewer pictures in `beside` than places for them. */
int mt_images_take(mt_images *images, json_t *messages, const json_t *beside, const char *folder, mt_error *error);

/* An error where the chat has no template that takes parts: a folder's. */
int mt_images_check_chat(const mt_chat *chat, mt_error *error);

/* Reads the pictures from `first` on, sets their grids, and in ids[from...], and turns alike, replaces the k-th image
 * token by as many as picture first + k has merged patches. Errors: those of mt_picture_read and mt_image_grid_of;
 * another number of image tokens than of pictures. */
int mt_images_expand(mt_images *images, int64_t first, const mt_image_reader *reader, mt_ids *ids, mt_ids *turns,
                     int64_t from, mt_error *error);

/* The image tokens of a grid. */
int64_t mt_image_tokens(const mt_image_config *config, const mt_image_grid *grid);

/* patches[grid.height grid.width, numbers of a patch] of a picture with a grid. Errors: the file has other contents
 * than before. */
int mt_image_read(float *patches, const mt_image *image, const mt_image_config *config, mt_error *error);

/* A conversation. `messages` is a list of objects, as mt_images_take has them, which may have further fields that the
 * template takes; it is not changed. */
typedef struct mt_image_chat {
    const json_t *messages;
    const json_t *beside;         // pictures beside the messages: see mt_images_take
    const mt_chat_extras *extras; // tools and variables, or NULL; its `fields` are not read
    bool generates;               // the tokens end where an answer begins
} mt_image_chat;

/* All of it: appends the tokens of a conversation, each one's message or -1 to `turns` (mt_chat_encode), and its
 * pictures. After an error nothing is appended. */
int mt_image_chat_encode(mt_chat *chat, const mt_image_reader *reader, const mt_image_chat *conversation, mt_ids *ids,
                         mt_ids *turns, mt_images *images, mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
