/* text_images.h: the pictures of a text, for mt_sequence.images. */
#ifndef MT_TEXT_IMAGES_H
#define MT_TEXT_IMAGES_H

#include "../datasets/image_chat.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_text_images mt_text_images;

/* Takes the pictures of a text over, whose image tokens are among tokens[count] (mt_images_expand); `images` is empty
 * then. NULL: there are none. */
mt_text_images *mt_text_images_open(mt_images *images, const mt_image_reader *reader, const int32_t *tokens,
                                    int64_t count);

/* One more owner; and one less, the last of them frees it. Any thread may call them. NULL is allowed. */
mt_text_images *mt_text_images_share(mt_text_images *text);
void mt_text_images_close(mt_text_images *text);

/* Appends what another rank needs to read the pictures too; and the pictures of such bytes. */
void mt_text_images_pack(const mt_text_images *text, mt_text *bytes);
mt_text_images *mt_text_images_unpack(const char *bytes);

/* For mt_sequence.images; of NULL NULL. */
const mt_sequence_images *mt_text_images_list(const mt_text_images *text);

/* The image tokens of all, and the patches of the largest one; 0 of NULL. */
int64_t mt_text_images_tokens(const mt_text_images *text);
int64_t mt_text_images_patches(const mt_text_images *text);

#ifdef __cplusplus
}
#endif
#endif
