/* drawing.c: the beginning of an SVG file. */
#include "drawing.h"

int mt_drawing_open(mt_new_file *file, const char *path, double width, double height, const char *title,
                    mt_error *error) {
    if (mt_new_file_open(file, path, "--print-schedule", error) != 0) return -1;
    fprintf(file->stream,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\" "
            "font-family=\"monospace\" font-size=\"11\" fill=\"#24292f\">\n<title>%s</title>\n"
            "<rect width=\"%.0f\" height=\"%.0f\" rx=\"8\" fill=\"#fdfdfb\"/>\n",
            width, height, width, height, title, width, height);
    return 0;
}
