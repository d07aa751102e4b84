/* images.h: pictures from files of PNG and JPEG, as patches for a vision tower, resized and normalised as the image
 * processors of Qwen-VL in transformers do.
 *
 *   file -> picture [height, width, 3] of bytes -> resized, sides of whole tokens -> patches [P, numbers]
 */
#ifndef MT_IMAGES_H
#define MT_IMAGES_H

#include "../../megatron.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How pictures become patches. */
typedef struct mt_image_config {
    int64_t patch_size, temporal_patch_size, merge_size; // of the tower
    int64_t min_pixels, max_pixels;                      // of a resized picture
    double mean[MT_IMAGE_CHANNELS], std[MT_IMAGE_CHANNELS];
} mt_image_config;

/* Red, green and blue of each pixel, row by row. */
typedef struct mt_picture {
    int64_t height, width;
    uint8_t *pixels; // [height, width, 3]
} mt_picture;

/* The configuration for a tower: that of its family, and what "image_processor" of processor_config.json in a folder
 * (NULL: none) says, or else preprocessor_config.json. Errors: a file that cannot be read; values of wrong types; sizes
 * that are not the tower's. */
int mt_image_config_read(mt_image_config *config, const mt_options *options, const char *folder, mt_error *error);

/* Reads a picture, to be freed by mt_picture_free: of 8 bits a channel, gray or coloured, laid over white where it is
 * transparent; marks of its orientation are not read. Errors: no such file, neither PNG nor JPEG, damaged, of 16 bits
 * or CMYK, of more than 2^28 pixels. */
int mt_picture_read(mt_picture *picture, const char *path, mt_error *error);

/* The same of a file in memory; `path` names it in messages. */
int mt_picture_decode(mt_picture *picture, const char *bytes, int64_t count, const char *path, mt_error *error);
void mt_picture_free(mt_picture *picture);

/* The patches of a picture of so many pixels: sides are rounded to whole tokens, and scaled where there are more or
 * fewer pixels than allowed. Errors: a side 200 times the other one. */
int mt_image_grid_of(mt_image_grid *grid, const mt_image_config *config, int64_t height, int64_t width,
                     const char *path, mt_error *error);

/* patches[grid->height grid->width, numbers of a patch], in the order of mt_image_batch, of a picture that is resized
 * to the grid by Pillow's bicubic filter, over more pixels where it becomes smaller, each pass rounded to bytes. */
void mt_image_patches(float *patches, const mt_image_config *config, const mt_picture *picture,
                      const mt_image_grid *grid);

#ifdef __cplusplus
}
#endif
#endif
