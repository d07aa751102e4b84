/* mxfp4.c: see mxfp4.h. */
#include "mxfp4.h"

#include <math.h>
#include <stdio.h>

static const mt_tensor_info *mt_mxfp4_part(const mt_safetensors *set, const char *name, const char *end) {
    char text[300];
    snprintf(text, sizeof text, "%.250s_%s", name, end);
    return mt_safetensors_find(set, text);
}

int mt_mxfp4_find(mt_mxfp4 *matrix, const mt_safetensors *set, const char *name, mt_error *error) {
    const mt_tensor_info *blocks = mt_mxfp4_part(set, name, "blocks"), *scales = mt_mxfp4_part(set, name, "scales");
    if (!blocks && !scales) return 1;
    if (!blocks || !scales) {
        const mt_tensor_info *found = blocks ? blocks : scales;
        return mt_error_set(error, "%s: tensor \"%s\" is there, but \"%.250s_%s\" is missing; get the checkpoint again",
                            found->file, found->name, name, blocks ? "scales" : "blocks");
    }
    int64_t dims = scales->num_dims;
    bool fits = blocks->dtype == MT_U8 && scales->dtype == MT_U8 && dims >= 2 && blocks->num_dims == dims + 1 &&
                blocks->shape[dims] == MT_MXFP4_BLOCK / 2;
    for (int64_t i = 0; fits && i < dims; i++) fits = blocks->shape[i] == scales->shape[i];
    if (!fits)
        return mt_error_set(error,
                            "%s: tensors \"%s\" and \"%.250s_scales\" must be U8 [..., rows, columns / 32, 16] and "
                            "[..., rows, columns / 32]; get the checkpoint again, or load the bf16 model",
                            blocks->file, blocks->name, name);
    *matrix = (mt_mxfp4){.blocks = blocks->data, .scales = scales->data, .matrices = 1};
    matrix->row_count = scales->shape[dims - 2], matrix->cols = scales->shape[dims - 1] * MT_MXFP4_BLOCK;
    for (int64_t i = 0; i < dims - 2; i++) matrix->matrices *= scales->shape[i];
    matrix->rows = matrix->matrices * matrix->row_count;
    return 0;
}

void mt_mxfp4_row_to_f32(float *to, const unsigned char *bytes, const unsigned char *scales, int64_t first,
                         int64_t count) {
    static const float magnitudes[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6}; // of e2m1; the fourth bit is the sign
    enum { NAN_SCALE = 255, BIAS = 127 };
    float scale = 0;
    for (int64_t i = first; i < first + count; i++) {
        if (i == first || i % MT_MXFP4_BLOCK == 0) {
            int exponent = scales[i / MT_MXFP4_BLOCK];
            scale = exponent == NAN_SCALE ? NAN : ldexpf(1, exponent - BIAS);
        }
        int byte = bytes[i / 2 - first / 2], code = i % 2 == 0 ? byte & 15 : byte >> 4;
        *to++ = (code < 8 ? magnitudes[code] : -magnitudes[code - 8]) * scale;
    }
}

void mt_mxfp4_to_f32(float *to, const mt_mxfp4 *matrix, int64_t first, int64_t rows) {
    for (int64_t row = first; row < first + rows; row++, to += matrix->cols)
        mt_mxfp4_row_to_f32(to, matrix->blocks + row * matrix->cols / 2,
                            matrix->scales + row * matrix->cols / MT_MXFP4_BLOCK, 0, matrix->cols);
}
