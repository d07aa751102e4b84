/* drawing.h: the beginning of an SVG file. */
#ifndef MT_DRAWING_H
#define MT_DRAWING_H

#include "file.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Opens an SVG file of --print-schedule with a title on a light ground, to be closed by mt_new_file_close. */
int mt_drawing_open(mt_new_file *file, const char *path, double width, double height, const char *title,
                    mt_error *error);

#ifdef __cplusplus
}
#endif
#endif
