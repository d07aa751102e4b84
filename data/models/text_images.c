/* text_images.c: the pictures of a text, for mt_sequence.images. */
#include "text_images.h"

#include "../tokens/tokenizer_vocab.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct mt_text_images {
    atomic_int owners;
    mt_images images;
    mt_image_config config;
    mt_sequence_image *items;
    mt_sequence_images list;
    int64_t tokens, patches;
};

static int read_patches(void *context, int64_t image, float *patches, mt_error *error) {
    const mt_text_images *t = context;
    return mt_image_read(patches, &t->images.items[image], &t->config, error);
}

static mt_text_images *new_images(const mt_image_config *config) {
    mt_text_images *t = mt_calloc((int64_t)sizeof *t);
    atomic_init(&t->owners, 1);
    t->config = *config;
    return t;
}

/* From pictures and their first tokens. */
static void complete(mt_text_images *t) {
    for (int64_t i = 0; i < t->images.count; i++) {
        const mt_image *image = &t->images.items[i];
        t->items[i].grid = image->grid, t->items[i].key = image->fingerprint;
        t->tokens += mt_image_tokens(&t->config, &image->grid);
        t->patches = mt_max(t->patches, image->grid.height * image->grid.width);
    }
    t->list = (mt_sequence_images){t->images.count, t->items, read_patches, t};
}

mt_text_images *mt_text_images_open(mt_images *images, const mt_image_reader *reader, const int32_t *tokens,
                                    int64_t count) {
    if (images->count == 0) return NULL;
    mt_text_images *t = new_images(&reader->config);
    t->images = *images;
    *images = (mt_images){0};
    t->items = mt_calloc(t->images.count * (int64_t)sizeof *t->items);
    for (int64_t i = 0, at = 0; i < t->images.count; i++) {
        while (at < count && tokens[at] != reader->image_token_id) at++;
        t->items[i].first = at, at += mt_image_tokens(&t->config, &t->images.items[i].grid);
        MT_CHECK(at <= count);
    }
    complete(t);
    return t;
}

mt_text_images *mt_text_images_share(mt_text_images *t) {
    if (t) atomic_fetch_add(&t->owners, 1);
    return t;
}

void mt_text_images_close(mt_text_images *t) {
    if (!t || atomic_fetch_sub(&t->owners, 1) > 1) return;
    mt_images_cut(&t->images, 0);
    free(t->items);
    free(t);
}

const mt_sequence_images *mt_text_images_list(const mt_text_images *t) {
    return t ? &t->list : NULL;
}

int64_t mt_text_images_tokens(const mt_text_images *t) {
    return t ? t->tokens : 0;
}

int64_t mt_text_images_patches(const mt_text_images *t) {
    return t ? t->patches : 0;
}

/* ---- for other ranks: the configuration, the number of pictures, and each one's numbers and source */

typedef struct packed_image {
    mt_image_grid grid;
    uint64_t fingerprint;
    int64_t first, bytes; // bytes of the source, whose end is among them
} packed_image;

void mt_text_images_pack(const mt_text_images *t, mt_text *bytes) {
    mt_text_append(bytes, (const char *)&t->config, (int64_t)sizeof t->config);
    mt_text_append(bytes, (const char *)&t->images.count, (int64_t)sizeof t->images.count);
    for (int64_t i = 0; i < t->images.count; i++) {
        const mt_image *image = &t->images.items[i];
        packed_image packed = {image->grid, image->fingerprint, t->items[i].first, (int64_t)strlen(image->source) + 1};
        mt_text_append(bytes, (const char *)&packed, (int64_t)sizeof packed);
        mt_text_append(bytes, image->source, packed.bytes);
    }
}

mt_text_images *mt_text_images_unpack(const char *bytes) {
    mt_image_config config;
    int64_t count;
    memcpy(&config, bytes, sizeof config), bytes += sizeof config;
    memcpy(&count, bytes, sizeof count), bytes += sizeof count;
    mt_text_images *t = new_images(&config);
    t->images = (mt_images){mt_calloc(count * (int64_t)sizeof *t->images.items), count, count, false};
    t->items = mt_calloc(count * (int64_t)sizeof *t->items);
    for (int64_t i = 0; i < count; i++) {
        packed_image packed;
        memcpy(&packed, bytes, sizeof packed), bytes += sizeof packed;
        t->images.items[i] = (mt_image){mt_strdup(bytes), packed.grid, packed.fingerprint};
        t->items[i].first = packed.first, bytes += packed.bytes;
    }
    complete(t);
    return t;
}
