/* mxfp4.h: weights in MXFP4 (OCP, "Microscaling formats (MX) specification", 1.0), as the folders of gpt-oss have them:
 * values in e2m1, two in a byte and the first in its low bits, and for each 32 of a row a scale in e8m0. */
#ifndef MT_MXFP4_H
#define MT_MXFP4_H

#include "../base/safetensors.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Values that share a scale. */
enum { MT_MXFP4_BLOCK = 32 };

/* A matrix, or several stacked ones: `rows` counts the rows of all, `row_count` those of one. */
typedef struct mt_mxfp4 {
    const unsigned char *blocks; // [rows, cols / 32, 16]
    const unsigned char *scales; // [rows, cols / 32]
    int64_t rows, cols;
    int64_t matrices, row_count;
} mt_mxfp4;

/* Finds NAME_blocks [..., rows, cols / 32, 16] and NAME_scales [..., rows, cols / 32] of a set, both U8. Returns 1 if
 * there is neither, -1 with an error if one is missing or a type or shape is another. */
int mt_mxfp4_find(mt_mxfp4 *matrix, const mt_safetensors *set, const char *name, mt_error *error);

/* to[count] = values [first, first + count) of a row. `bytes` is the address of the byte with the first of them,
 * `scales` that of the row's scales. The scale 255 stands for NaN. */
void mt_mxfp4_row_to_f32(float *to, const unsigned char *bytes, const unsigned char *scales, int64_t first,
                         int64_t count);

/* to[rows, cols] = the values of rows [first, first + rows). */
void mt_mxfp4_to_f32(float *to, const mt_mxfp4 *matrix, int64_t first, int64_t rows);

#ifdef __cplusplus
}
#endif
#endif
