/* test_images.c: pictures become the patches that transformers' processor makes of them; bad ones are refused. */
#include "../data/base/file.h"
#include "../data/base/safetensors.h"
#include "../data/datasets/images.h"
#include "folder.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const char *const pictures[] = {"square.png", "large.png",      "small.png",   "wide.png",  "gray.png",
                                       "alpha.png",  "gray_alpha.png", "palette.png", "photo.jpg", "progressive.jpg"};
enum { NUM_PICTURES = sizeof pictures / sizeof *pictures, PATCH_NUMBERS = MT_IMAGE_CHANNELS * 2 * 4 * 4 };

static mt_options tower(mt_vision_tower kind) {
    return (mt_options){.vision = {.tower = kind, .patch_size = 4, .temporal_patch_size = 2, .spatial_merge_size = 2}};
}

/* True where this build cannot read the picture, and says why. */
static bool is_unread(const char *path, bool is_png) {
    mt_picture picture;
    mt_error error = {{0}};
#ifdef MT_HAVE_PNG
    if (is_png) return false;
#endif
#ifdef MT_HAVE_JPEG
    if (!is_png) return false;
#endif
    assert_int_equal(mt_picture_read(&picture, path, &error), -1);
    assert_non_null(strstr(error.text, is_png ? "built without libpng" : "built without libjpeg"));
    printf("skipped: %s, %s\n", path, error.text);
    return true;
}

static void patches_equal_the_processor_of_transformers(void **state) {
    (void)state;
    mt_error error = {{0}};
    mt_safetensors *reference;
    int compared = 0;
    if (mt_safetensors_open_folder(&reference, "tests/golden/images", "pixels", &error) != 0)
        fail_msg("%s", error.text);
    for (int k = 0; k < NUM_PICTURES; k++)
        for (int half = 0; half < 2; half++) {
            char path[256], name[128];
            bool is_png = strstr(pictures[k], ".png") != NULL;
            snprintf(name, sizeof name, "%s.%s", pictures[k], half ? "half" : "clip");
            const mt_tensor_info *pixels = mt_safetensors_find(reference, name);
            snprintf(path, sizeof path, "tests/golden/images/%s", pictures[k]);
            if (!pixels || is_unread(path, is_png)) continue;
            char of_grid[160];
            snprintf(of_grid, sizeof of_grid, "%s.grid", name);
            const int32_t *grid_thw = mt_safetensors_find(reference, of_grid)->data;
            mt_options o = tower(half ? MT_VISION_QWEN3 : MT_VISION_QWEN2_5);
            mt_image_config config;
            mt_picture picture;
            mt_image_grid grid;
            assert_int_equal(mt_image_config_read(&config, &o, NULL, &error), 0);
            config.min_pixels = 256, config.max_pixels = 1600;
            if (mt_picture_read(&picture, path, &error) != 0) fail_msg("%s", error.text);
            assert_int_equal(mt_image_grid_of(&grid, &config, picture.height, picture.width, path, &error), 0);
            if (grid.height != grid_thw[1] || grid.width != grid_thw[2])
                fail_msg("%s: %lld x %lld patches, expected %d x %d", path, (long long)grid.height,
                         (long long)grid.width, grid_thw[1], grid_thw[2]);
            int64_t count = grid.height * grid.width * PATCH_NUMBERS;
            assert_int_equal(count * 4, pixels->bytes);
            float *patches = mt_malloc(count * 4);
            mt_image_patches(patches, &config, &picture, &grid);
            // libraries of JPEG may round a channel by one or two of 255, the least deviation is 0.26 of 1
            double tolerance = is_png ? 1e-6 : 3.0 / 255 / 0.26;
            for (int64_t i = 0; i < count; i++)
                if (!(fabs((double)patches[i] - (double)((const float *)pixels->data)[i]) <= tolerance))
                    fail_msg("%s: number %lld is %.7f, expected %.7f", name, (long long)i, (double)patches[i],
                             (double)((const float *)pixels->data)[i]);
            free(patches);
            mt_picture_free(&picture);
            compared++;
        }
    printf("%d sets of patches\n", compared);
    mt_safetensors_close(reference);
}

static void assert_refused(const char *bytes, int64_t count, const char *message) {
    mt_picture picture;
    mt_error error = {{0}};
    assert_int_equal(mt_picture_decode(&picture, bytes, count, "file", &error), -1);
    if (!strstr(error.text, message) && !strstr(error.text, "built without"))
        fail_msg("'%s' instead of '%s'", error.text, message);
    assert_null(picture.pixels);
}

static void damaged_pictures_are_refused(void **state) {
    (void)state;
    mt_error error;
    int64_t png_bytes, jpeg_bytes;
    char *png = mt_file_read("tests/golden/images/large.png", 1 << 20, &png_bytes, &error);
    char *jpeg = mt_file_read("tests/golden/images/photo.jpg", 1 << 20, &jpeg_bytes, &error);
    assert_non_null(png), assert_non_null(jpeg);
    assert_refused("GIF89a", 6, "neither PNG nor JPEG");
    assert_refused("", 0, "neither PNG nor JPEG");
    for (int64_t n = 8; n < png_bytes; n += 37) assert_refused(png, n, "damaged or unsupported PNG");
    for (int64_t n = 3; n < jpeg_bytes - 2; n += 37) assert_refused(jpeg, n, "damaged or unsupported JPEG");
    png[png_bytes / 2] ^= 1; // its sum no longer fits
    assert_refused(png, png_bytes, "damaged or unsupported PNG");
    png[png_bytes / 2] ^= 1;
    memcpy(png + 16, "\x7f\xff\xff\xff\x7f\xff\xff\xff", 8); // an absurd size
    assert_refused(png, png_bytes, "");
    free(png), free(jpeg);
    mt_picture picture;
    assert_int_equal(mt_picture_read(&picture, "tests/golden/images/absent.png", &error), -1);
    assert_non_null(strstr(error.text, "absent.png"));
}

static void sizes_follow_the_processor(void **state) {
    static const struct {
        int64_t height, width, rows, columns; // as smart_resize of transformers gives them, in patches of 16
    } cases[] = {
        {1080, 1920, 68, 120}, {100, 100, 16, 16}, {1, 100, 2, 160}, {20000, 10000, 362, 180}, {256, 256, 16, 16}};
    (void)state;
    mt_options o = tower(MT_VISION_QWEN3);
    o.vision.patch_size = 16;
    mt_image_config config;
    mt_image_grid grid;
    mt_error error = {{0}};
    assert_int_equal(mt_image_config_read(&config, &o, NULL, &error), 0);
    assert_int_equal(config.min_pixels, 65536), assert_int_equal(config.max_pixels, 16777216);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(mt_image_grid_of(&grid, &config, cases[i].height, cases[i].width, "p", &error), 0);
        if (grid.height != cases[i].rows || grid.width != cases[i].columns)
            fail_msg("%lld x %lld: %lld x %lld patches, expected %lld x %lld", (long long)cases[i].height,
                     (long long)cases[i].width, (long long)grid.height, (long long)grid.width, (long long)cases[i].rows,
                     (long long)cases[i].columns);
    }
    assert_int_equal(mt_image_grid_of(&grid, &config, 1, 201, "p", &error), -1);
    assert_non_null(strstr(error.text, "p: 201 x 1 pixels; a side may be at most 200 times the other one"));
}

static void write_file(const char *name, const char *text) {
    FILE *file = fopen(at(name), "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void write_config(const char *text) {
    write_file("preprocessor_config.json", text);
}

static void the_processors_file_is_read(void **state) {
    static const struct {
        const char *text, *message;
    } bad[] = {{"[", "is not a JSON object"},
               {"{\"patch_size\": 8}", "patches of 8 pixels"},
               {"{\"max_pixels\": 0}", "\"max_pixels\" must be a whole number from 1 on"},
               {"{\"image_std\": [1, 1, 0]}", "\"image_std\" must list three numbers above 0"},
               {"{\"do_resize\": false}", "\"do_resize\" must be true"}};
    (void)state;
    mt_options o = tower(MT_VISION_QWEN2_5);
    mt_image_config config;
    mt_error error = {{0}};
    assert_int_equal(mt_image_config_read(&config, &o, root, &error), 0); // without a file
    assert_true(config.mean[0] == 0.48145466 && config.std[2] == 0.27577711);
    write_config("{\"patch_size\": 4, \"merge_size\": 2, \"min_pixels\": 300, \"size\": {\"longest_edge\": 5000}, "
                 "\"image_mean\": [0, 0.5, 1], \"do_resize\": true}");
    if (mt_image_config_read(&config, &o, root, &error) != 0) fail_msg("%s", error.text);
    assert_int_equal(config.min_pixels, 300), assert_int_equal(config.max_pixels, 5000);
    assert_true(config.mean[2] == 1);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_config(bad[i].text);
        assert_int_equal(mt_image_config_read(&config, &o, root, &error), -1);
        if (!strstr(error.text, bad[i].message)) fail_msg("'%s' instead of '%s'", error.text, bad[i].message);
    }
    // transformers 5 writes the processor's own file, which counts if it has the image processor
    write_file("processor_config.json",
               "{\"image_processor\": {\"size\": {\"longest_edge\": 7000}}, \"min_pixels\": 9}");
    assert_int_equal(mt_image_config_read(&config, &o, root, &error), 0);
    assert_int_equal(config.max_pixels, 7000), assert_int_equal(config.min_pixels, 4 * 8 * 8);
    write_file("processor_config.json", "{\"processor_class\": \"Qwen2_5_VLProcessor\"}");
    write_config("{\"max_pixels\": 8000}");
    assert_int_equal(mt_image_config_read(&config, &o, root, &error), 0);
    assert_int_equal(config.max_pixels, 8000);
    write_file("processor_config.json", "[]");
    assert_int_equal(mt_image_config_read(&config, &o, root, &error), -1);
    assert_non_null(strstr(error.text, "processor_config.json: is not a JSON object"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(patches_equal_the_processor_of_transformers),
        cmocka_unit_test(damaged_pictures_are_refused),
        cmocka_unit_test(sizes_follow_the_processor),
        cmocka_unit_test(the_processors_file_is_read),
    };
    return cmocka_run_group_tests_name("images", tests, make_root, remove_root);
}
