/* images.c: see images.h. PNG is read by libpng and JPEG by libjpeg-turbo, where they were found. */
#include "images.h"

#include "../base/file.h"

#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef MT_HAVE_PNG
#include <png.h>
#endif
#ifdef MT_HAVE_JPEG
#include <jpeglib.h>
#endif

enum { CHANNELS = MT_IMAGE_CHANNELS };

static const int64_t max_file_bytes = (int64_t)1 << 30;

void mt_picture_free(mt_picture *picture) {
    free(picture->pixels);
    *picture = (mt_picture){0};
}

#if defined MT_HAVE_PNG || defined MT_HAVE_JPEG
static const int64_t max_pixels_read = (int64_t)1 << 28;

/* Memory for a picture; -1 where it is absurd. */
static int picture_allocate(mt_picture *picture, int64_t height, int64_t width, const char *path, mt_error *error) {
    if (height < 1 || width < 1 || height > max_pixels_read / width)
        return mt_error_set(error, "%s: %lld x %lld pixels; pictures have 1 to %lld", path, (long long)width,
                            (long long)height, (long long)max_pixels_read);
    picture->height = height, picture->width = width;
    picture->pixels = mt_calloc(height * width * CHANNELS);
    return 0;
}

#endif

/* ---- PNG */

#ifdef MT_HAVE_PNG
/* The file in memory, and what the jump out of libpng leaves behind. */
typedef struct png_source {
    const char *bytes;
    int64_t count, at;
    char message[160];
    jmp_buf jump;
    mt_picture picture;
    uint8_t *pixels; // [height, width, 4] with the coverage
    png_bytep *rows;
} png_source;

static void png_failed(png_structp png, png_const_charp message) {
    png_source *source = png_get_error_ptr(png);
    snprintf(source->message, sizeof source->message, "%s", message);
    longjmp(source->jump, 1);
}

static void png_warned(png_structp png, png_const_charp message) {
    (void)png, (void)message;
}

static void png_take(png_structp png, png_bytep to, size_t count) {
    png_source *source = png_get_io_ptr(png);
    if ((int64_t)count > source->count - source->at) png_error(png, "it ends too early");
    memcpy(to, source->bytes + source->at, count);
    source->at += (int64_t)count;
}

/* Reads the picture of `source`; false with its message. */
static bool png_decode(png_source *source, png_structp png, png_infop info, const char *path, mt_error *error) {
    if (setjmp(source->jump)) return false;
    png_set_read_fn(png, source, png_take);
    png_read_info(png, info);
    int color = png_get_color_type(png, info), depth = png_get_bit_depth(png, info);
    if (depth == 16) png_error(png, "16 bits a channel are not supported; save it with 8");
    if (color == PNG_COLOR_TYPE_PALETTE) png_set_palette_to_rgb(png);
    if (color == PNG_COLOR_TYPE_GRAY && depth < 8) png_set_expand_gray_1_2_4_to_8(png);
    if (!(color & PNG_COLOR_MASK_COLOR)) png_set_gray_to_rgb(png);
    if (png_get_valid(png, info, PNG_INFO_tRNS)) png_set_tRNS_to_alpha(png);
    png_set_add_alpha(png, 255, PNG_FILLER_AFTER);
    png_set_interlace_handling(png);
    png_read_update_info(png, info);
    int64_t height = png_get_image_height(png, info), width = png_get_image_width(png, info);
    if (picture_allocate(&source->picture, height, width, path, error) != 0) return false;
    if ((int64_t)png_get_rowbytes(png, info) != 4 * width) png_error(png, "its rows have another length");
    source->rows = mt_malloc(height * (int64_t)sizeof *source->rows);
    source->pixels = mt_calloc(4 * height * width);
    for (int64_t y = 0; y < height; y++) source->rows[y] = source->pixels + 4 * y * width;
    png_read_image(png, source->rows);
    png_read_end(png, NULL);
    return true;
}

/* Lays pixels with coverage over white, in whole numbers with seven more bits, as Pillow. */
static void lay_over_white(mt_picture *picture, const uint8_t *pixels) {
    for (int64_t i = 0; i < picture->height * picture->width; i++)
        for (int channel = 0; channel < CHANNELS; channel++) {
            int cover = pixels[4 * i + CHANNELS], sum = pixels[4 * i + channel] * cover + 255 * (255 - cover);
            sum = (sum << 7) + (1 << 14);
            picture->pixels[i * CHANNELS + channel] = (uint8_t)((sum + (sum >> 8)) >> 15);
        }
}

static int read_png(mt_picture *picture, const char *bytes, int64_t count, const char *path, mt_error *error) {
    png_source *source = mt_calloc((int64_t)sizeof *source);
    source->bytes = bytes, source->count = count;
    png_structp png = png_create_read_struct(PNG_LIBPNG_VER_STRING, source, png_failed, png_warned);
    png_infop info = png ? png_create_info_struct(png) : NULL;
    bool decoded = info && png_decode(source, png, info, path, error);
    png_destroy_read_struct(&png, &info, NULL);
    *picture = source->picture;
    if (decoded) lay_over_white(picture, source->pixels);
    free(source->rows), free(source->pixels);
    if (!decoded && source->message[0])
        mt_error_set(error, "%s: damaged or unsupported PNG: %s", path, source->message);
    if (!decoded) mt_picture_free(picture);
    free(source);
    return decoded ? 0 : -1;
}
#else
static int read_png(mt_picture *picture, const char *bytes, int64_t count, const char *path, mt_error *error) {
    (void)picture, (void)bytes, (void)count;
    return mt_error_set(error, "%s: this program was built without libpng; make deps installs it, then make probe",
                        path);
}
#endif

/* ---- JPEG */

#ifdef MT_HAVE_JPEG
typedef struct jpeg_source {
    struct jpeg_decompress_struct jpeg;
    struct jpeg_error_mgr errors; // `output_message` and `error_exit` find this struct by jpeg.client_data
    char message[JMSG_LENGTH_MAX];
    jmp_buf jump;
    mt_picture picture;
} jpeg_source;

static void jpeg_failed(j_common_ptr jpeg) {
    jpeg_source *source = jpeg->client_data;
    jpeg->err->format_message(jpeg, source->message);
    longjmp(source->jump, 1);
}

/* Warnings are of damaged data, which a decoder would fill with gray: an error here. */
static void jpeg_warned(j_common_ptr jpeg, int level) {
    if (level < 0) jpeg_failed(jpeg);
}

static bool jpeg_decode(jpeg_source *source, const char *bytes, int64_t count, const char *path, mt_error *error) {
    struct jpeg_decompress_struct *jpeg = &source->jpeg;
    if (setjmp(source->jump)) return false;
    jpeg_create_decompress(jpeg);
    jpeg_mem_src(jpeg, (const unsigned char *)bytes, (unsigned long)count);
    (void)jpeg_read_header(jpeg, TRUE);
    if (jpeg->num_components != 1 && jpeg->num_components != CHANNELS) {
        mt_error_set(error, "%s: a JPEG of %d colours is not supported; save it in RGB", path, jpeg->num_components);
        return false;
    }
    jpeg->out_color_space = JCS_RGB, jpeg->dct_method = JDCT_ISLOW;
    if (picture_allocate(&source->picture, jpeg->image_height, jpeg->image_width, path, error) != 0) return false;
    (void)jpeg_start_decompress(jpeg);
    while (jpeg->output_scanline < jpeg->output_height) {
        JSAMPROW row = source->picture.pixels + (int64_t)jpeg->output_scanline * source->picture.width * CHANNELS;
        (void)jpeg_read_scanlines(jpeg, &row, 1);
    }
    (void)jpeg_finish_decompress(jpeg);
    return true;
}

static int read_jpeg(mt_picture *picture, const char *bytes, int64_t count, const char *path, mt_error *error) {
    jpeg_source *source = mt_calloc((int64_t)sizeof *source);
    source->jpeg.err = jpeg_std_error(&source->errors), source->jpeg.client_data = source;
    source->errors.error_exit = jpeg_failed, source->errors.emit_message = jpeg_warned;
    bool decoded = jpeg_decode(source, bytes, count, path, error);
    jpeg_destroy_decompress(&source->jpeg);
    *picture = source->picture;
    if (!decoded && source->message[0])
        mt_error_set(error, "%s: damaged or unsupported JPEG: %s", path, source->message);
    if (!decoded) mt_picture_free(picture);
    free(source);
    return decoded ? 0 : -1;
}
#else
static int read_jpeg(mt_picture *picture, const char *bytes, int64_t count, const char *path, mt_error *error) {
    (void)picture, (void)bytes, (void)count;
    return mt_error_set(error, "%s: this program was built without libjpeg; make deps installs it, then make probe",
                        path);
}
#endif

int mt_picture_decode(mt_picture *picture, const char *bytes, int64_t count, const char *path, mt_error *error) {
    static const char png_begin[] = "\x89PNG\r\n\x1a\n", jpeg_begin[] = "\xff\xd8\xff";
    *picture = (mt_picture){0};
    if (count >= 8 && memcmp(bytes, png_begin, 8) == 0) return read_png(picture, bytes, count, path, error);
    if (count >= 3 && memcmp(bytes, jpeg_begin, 3) == 0) return read_jpeg(picture, bytes, count, path, error);
    return mt_error_set(error, "%s: neither PNG nor JPEG; convert it to one of them", path);
}

int mt_picture_read(mt_picture *picture, const char *path, mt_error *error) {
    int64_t count;
    char *bytes = mt_file_read(path, max_file_bytes, &count, error);
    *picture = (mt_picture){0};
    if (!bytes) return -1;
    int status = mt_picture_decode(picture, bytes, count, path, error);
    free(bytes);
    return status;
}

/* ---- sizes */

/* A side as whole tokens of `factor` pixels: Python's round, halves to even. */
static int64_t whole_tokens(double side, int64_t factor, double (*rounds)(double)) {
    return (int64_t)rounds(side / (double)factor) * factor;
}

int mt_image_grid_of(mt_image_grid *grid, const mt_image_config *c, int64_t height, int64_t width, const char *path,
                     mt_error *error) {
    int64_t factor = c->patch_size * c->merge_size;
    double h = (double)height, w = (double)width;
    if (fmax(h, w) / fmin(h, w) > 200)
        return mt_error_set(error, "%s: %lld x %lld pixels; a side may be at most 200 times the other one", path,
                            (long long)width, (long long)height);
    int64_t rows = whole_tokens(h, factor, rint), columns = whole_tokens(w, factor, rint);
    if (rows * columns > c->max_pixels) {
        double beta = sqrt(h * w / (double)c->max_pixels);
        rows = mt_max(factor, whole_tokens(h / beta, factor, floor));
        columns = mt_max(factor, whole_tokens(w / beta, factor, floor));
    } else if (rows * columns < c->min_pixels) {
        double beta = sqrt((double)c->min_pixels / (h * w));
        rows = whole_tokens(h * beta, factor, ceil), columns = whole_tokens(w * beta, factor, ceil);
    }
    *grid = (mt_image_grid){.height = rows / c->patch_size, .width = columns / c->patch_size};
    return 0;
}

/* ---- resizing */

/* Keys' cubic with a = -1/2, over [-2, 2]. */
static double cubic(double x) {
    const double a = -0.5;
    x = fabs(x);
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? a * (((x - 5) * x + 8) * x - 4) : 0;
}

enum { WEIGHT_BITS = 22 }; // of weights as whole numbers; eight are the pixel's and two are spare

/* The weights of the pixels around each pixel of a resized row. */
typedef struct filter {
    int64_t most;     // weights of a pixel
    int64_t *first;   // [to] the first pixel
    int64_t *count;   // [to]
    int32_t *weights; // [to, most]
} filter;

static filter filter_create(int64_t from, int64_t to) {
    double scale = (double)from / (double)to, wide = fmax(scale, 1), reach = 2 * wide;
    filter f = {.most = (int64_t)ceil(reach) * 2 + 1};
    f.first = mt_malloc(to * 8), f.count = mt_malloc(to * 8), f.weights = mt_calloc(to * f.most * 4);
    double *exact = mt_malloc(f.most * 8);
    for (int64_t i = 0; i < to; i++) {
        double center = ((double)i + 0.5) * scale, sum = 0;
        int64_t begin = mt_max((int64_t)(center - reach + 0.5), 0), end = mt_min((int64_t)(center + reach + 0.5), from);
        for (int64_t k = 0; k < end - begin; k++) sum += exact[k] = cubic(((double)(begin + k) - center + 0.5) / wide);
        for (int64_t k = 0; k < end - begin; k++)
            f.weights[i * f.most + k] = (int32_t)lround(exact[k] / sum * (1 << WEIGHT_BITS));
        f.first[i] = begin, f.count[i] = end - begin;
    }
    free(exact);
    return f;
}

static void filter_free(filter *f) {
    free(f->first), free(f->count), free(f->weights);
}

/* The lines of a picture, rows or columns; strides are in pixels, between lines and within one. */
typedef struct picture_lines {
    uint8_t *pixels;
    int64_t line, step;
} picture_lines;

/* to[count, size, 3] from from[count, ..., 3] along a line. */
static void resize_lines(picture_lines to, picture_lines from, int64_t count, int64_t size, const filter *f) {
    for (int64_t line = 0; line < count; line++)
        for (int64_t i = 0; i < size; i++)
            for (int channel = 0; channel < CHANNELS; channel++) {
                int64_t sum = 1 << (WEIGHT_BITS - 1), pixel = line * to.line + i * to.step;
                for (int64_t k = 0; k < f->count[i]; k++) {
                    int64_t read = line * from.line + (f->first[i] + k) * from.step;
                    sum += (int64_t)from.pixels[read * CHANNELS + channel] * f->weights[i * f->most + k];
                }
                to.pixels[pixel * CHANNELS + channel] = (uint8_t)mt_clamp(sum >> WEIGHT_BITS, 0, 255);
            }
}

/* A copy of the picture with another width, or another height; rounded to bytes. */
static mt_picture picture_scale(const mt_picture *p, int64_t size, bool across) {
    mt_picture to = {.height = across ? p->height : size, .width = across ? size : p->width};
    filter f = filter_create(across ? p->width : p->height, size);
    to.pixels = mt_malloc(to.height * to.width * CHANNELS);
    picture_lines rows = {p->pixels, p->width, 1}, columns = {p->pixels, 1, p->width};
    if (across)
        resize_lines((picture_lines){to.pixels, size, 1}, rows, p->height, size, &f);
    else
        resize_lines((picture_lines){to.pixels, 1, p->width}, columns, p->width, size, &f);
    filter_free(&f);
    return to;
}

/* A copy with both, one after the other: in Pillow 13 the height comes first where it shrinks and the width grows. */
static mt_picture picture_resize(const mt_picture *picture, int64_t height, int64_t width) {
    bool down_first = width > picture->width && height < picture->height;
    mt_picture done = *picture;
    done.pixels = mt_malloc(done.height * done.width * CHANNELS);
    memcpy(done.pixels, picture->pixels, (size_t)(done.height * done.width * CHANNELS));
    for (int pass = 0; pass < 2; pass++) {
        bool across = (pass == 0) != down_first;
        int64_t size = across ? width : height;
        if (size == (across ? done.width : done.height)) continue;
        mt_picture next = picture_scale(&done, size, across);
        mt_picture_free(&done);
        done = next;
    }
    return done;
}

void mt_image_patches(float *patches, const mt_image_config *c, const mt_picture *picture, const mt_image_grid *grid) {
    int64_t side = c->patch_size, merge = c->merge_size, frames = c->temporal_patch_size, area = side * side;
    mt_picture resized = picture_resize(picture, grid->height * side, grid->width * side);
    float value[CHANNELS][256];
    for (int channel = 0; channel < CHANNELS; channel++)
        for (int byte = 0; byte < 256; byte++)
            value[channel][byte] = (float)(((double)byte / 255 - c->mean[channel]) / c->std[channel]);
    for (int64_t patch = 0; patch < grid->height * grid->width; patch++) {
        int64_t square = patch / (merge * merge), within = patch % (merge * merge), across = grid->width / merge;
        int64_t row = square / across * merge + within / merge, column = square % across * merge + within % merge;
        for (int64_t i = 0; i < CHANNELS * frames * area; i++) {
            int64_t channel = i / (frames * area), y = row * side + i % area / side, x = column * side + i % side;
            uint8_t byte = resized.pixels[(y * resized.width + x) * CHANNELS + channel];
            patches[patch * CHANNELS * frames * area + i] = value[channel][byte];
        }
    }
    mt_picture_free(&resized);
}

/* ---- configuration */

/* Sets a number of the file, if it has the key; its place may be an object inside. */
static int read_size(const json_t *root, const char *inside, const char *key, int64_t *value, const char *path,
                     mt_error *error) {
    const json_t *object = inside ? json_object_get(root, inside) : root, *number = json_object_get(object, key);
    if (!number || json_is_null(number)) return 0;
    if (!json_is_integer(number) || json_integer_value(number) < 1 || json_integer_value(number) > INT32_MAX)
        return mt_error_set(error, "%s: \"%s\" must be a whole number from 1 on", path, key);
    *value = json_integer_value(number);
    return 0;
}

static int read_channels(const json_t *root, const char *key, double *values, bool positive, const char *path,
                         mt_error *error) {
    const json_t *list = json_object_get(root, key);
    if (!list) return 0;
    for (size_t i = 0; i < CHANNELS; i++) {
        const json_t *number = json_array_get(list, i);
        if (json_array_size(list) != CHANNELS || !json_is_number(number) ||
            (positive && json_number_value(number) <= 0))
            return mt_error_set(error, "%s: \"%s\" must list three numbers%s", path, key, positive ? " above 0" : "");
        values[i] = json_number_value(number);
    }
    return 0;
}

static int read_flag(const json_t *root, const char *key, const char *path, mt_error *error) {
    const json_t *flag = json_object_get(root, key);
    if (!flag || json_is_true(flag)) return 0;
    return mt_error_set(error, "%s: \"%s\" must be true: pictures are resized and normalised", path, key);
}

/* Reads a JSON object of a folder; NULL with status 0: there is no such file. */
static json_t *read_object(const char *path, int *status, mt_error *error) {
    int64_t bytes;
    json_error_t problem;
    *status = 0;
    if (access(path, F_OK) != 0) return NULL;
    *status = -1;
    char *text = mt_file_read(path, 1 << 24, &bytes, error);
    if (!text) return NULL;
    json_t *root = json_loadb(text, (size_t)bytes, 0, &problem);
    free(text);
    *status = json_is_object(root) ? 0 : -1;
    if (*status == 0) return root;
    mt_error_set(error, "%s: is not a JSON object: %s", path, root ? "another value" : problem.text);
    json_decref(root);
    return NULL;
}

/* The processor's configuration of a folder and its file: "image_processor" of processor_config.json, or else
 * preprocessor_config.json, as in transformers 5. NULL with status 0: none. */
static json_t *find_configuration(char path[4096], const char *folder, int *status, mt_error *error) {
    snprintf(path, 4096, "%s/processor_config.json", folder);
    json_t *root = read_object(path, status, error), *inner = json_object_get(root, "image_processor");
    if (json_is_object(inner)) json_incref(inner);
    json_decref(root);
    if (*status != 0 || json_is_object(inner)) return inner;
    snprintf(path, 4096, "%s/preprocessor_config.json", folder);
    return read_object(path, status, error);
}

int mt_image_config_read(mt_image_config *c, const mt_options *o, const char *folder, mt_error *error) {
    const mt_vision_options *v = &o->vision;
    static const double clip_mean[] = {0.48145466, 0.4578275, 0.40821073},
                        clip_std[] = {0.26862954, 0.26130258, 0.27577711};
    bool clip = v->tower == MT_VISION_QWEN2_5;
    int64_t factor = v->patch_size * v->spatial_merge_size;
    *c = (mt_image_config){.patch_size = v->patch_size,
                           .temporal_patch_size = v->temporal_patch_size,
                           .merge_size = v->spatial_merge_size};
    c->min_pixels = (clip ? 4 : 64) * factor * factor, c->max_pixels = (clip ? 1280 : 16384) * factor * factor;
    for (int i = 0; i < CHANNELS; i++) c->mean[i] = clip ? clip_mean[i] : 0.5, c->std[i] = clip ? clip_std[i] : 0.5;
    char path[4096];
    int status = 0;
    json_t *root = folder ? find_configuration(path, folder, &status, error) : NULL;
    if (!root) return status;
    mt_image_config own = *c;
    status = read_size(root, NULL, "patch_size", &c->patch_size, path, error);
    if (status == 0) status = read_size(root, NULL, "temporal_patch_size", &c->temporal_patch_size, path, error);
    if (status == 0) status = read_size(root, NULL, "merge_size", &c->merge_size, path, error);
    if (status == 0) status = read_size(root, NULL, "min_pixels", &c->min_pixels, path, error);
    if (status == 0) status = read_size(root, NULL, "max_pixels", &c->max_pixels, path, error);
    if (status == 0) status = read_size(root, "size", "shortest_edge", &c->min_pixels, path, error);
    if (status == 0) status = read_size(root, "size", "longest_edge", &c->max_pixels, path, error);
    if (status == 0) status = read_channels(root, "image_mean", c->mean, false, path, error);
    if (status == 0) status = read_channels(root, "image_std", c->std, true, path, error);
    if (status == 0) status = read_flag(root, "do_resize", path, error);
    if (status == 0) status = read_flag(root, "do_rescale", path, error);
    if (status == 0) status = read_flag(root, "do_normalize", path, error);
    json_decref(root);
    bool same = own.patch_size == c->patch_size && own.temporal_patch_size == c->temporal_patch_size &&
                own.merge_size == c->merge_size;
    if (status == 0 && !same)
        status =
            mt_error_set(error,
                         "%s: patches of %lld pixels, %lld frames and %lld a side of a token, and those of "
                         "config.json are %lld, %lld and %lld; make them agree",
                         path, (long long)c->patch_size, (long long)c->temporal_patch_size, (long long)c->merge_size,
                         (long long)own.patch_size, (long long)own.temporal_patch_size, (long long)own.merge_size);
    return status;
}
