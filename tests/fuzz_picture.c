/* fuzz_picture.c: arbitrary bytes -> a picture of PNG or JPEG -> patches. */
#include "data/datasets/images.h"

#include <math.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    enum { MOST = 4096 }; // pixels of a picture that is resized
    const mt_options options = {
        .vision = {.tower = MT_VISION_QWEN3, .patch_size = 4, .temporal_patch_size = 2, .spatial_merge_size = 2}};
    mt_image_config config;
    mt_picture picture;
    mt_image_grid grid;
    mt_error error = {{0}};
    MT_CHECK(mt_image_config_read(&config, &options, NULL, &error) == 0);
    config.min_pixels = 256, config.max_pixels = 1600;
    if (mt_picture_decode(&picture, (const char *)data, (int64_t)size, "file", &error) != 0) {
        MT_CHECK(error.text[0] != '\0' && !picture.pixels);
        return 0;
    }
    MT_CHECK(picture.height >= 1 && picture.width >= 1 && picture.pixels);
    bool small = picture.height <= MOST / picture.width;
    if (small && mt_image_grid_of(&grid, &config, picture.height, picture.width, "file", &error) == 0) {
        int64_t count = grid.height * grid.width * mt_patch_values(&options);
        MT_CHECK(grid.height % 2 == 0 && grid.width % 2 == 0 && count > 0);
        float *patches = mt_malloc(count * 4);
        mt_image_patches(patches, &config, &picture, &grid);
        for (int64_t i = 0; i < count; i++) MT_CHECK(fabsf(patches[i]) <= 1);
        free(patches);
    }
    mt_picture_free(&picture);
    return 0;
}
