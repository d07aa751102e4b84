/* step_plan_print.c: the blocks of dynamic context parallelism, as text and as a picture. */
#include "step_plan_print.h"

#include "../base/drawing.h"

#include <stdlib.h>
#include <string.h>

/* Fills one rank's row of `width` characters: "[4:12   ]" is a batch of 12 samples on 4 ranks. */
static void fill_plan_row(const mt_step_plan *plan, const double *start, double span, int64_t rank, int width,
                          char *row) {
    memset(row, '.', (size_t)width);
    row[width] = 0;
    for (int64_t slot = 0; slot < plan->num_slots; slot++) {
        int64_t index = plan->batch_of[slot * plan->num_ranks + rank];
        const mt_plan_batch *batch = &plan->batches[index];
        int from = (int)(start[index] / span * width + 0.5);
        int to = (int)((start[index] + batch->work) / span * width + 0.5), length;
        char label[64];
        if (to <= from) continue;
        memset(row + from, ' ', (size_t)(to - from));
        row[from] = '[', row[to - 1] = ']';
        length = snprintf(label, sizeof label, "%lld:%lld", (long long)batch->context_size, (long long)batch->count);
        if (length <= to - from - 2) memcpy(row + from + 1, label, (size_t)length);
    }
}

/* A box for each sample of a batch, as wide as its share of the batch's tokens. */
static void draw_batch(const mt_step_plan *plan, const mt_plan_batch *batch, FILE *svg, double x, double y,
                       double width) {
    static const char *const fills[] = {"#9cc3e6", "#9fd6cf", "#a9d18e", "#e6d690", "#edb98a", "#e59a9a", "#c9a6dd"};
    const double height = 24 * (double)batch->context_size - 2;
    int64_t color = 0;
    while (color < 6 && (int64_t)1 << color < batch->context_size) color++;
    for (int64_t i = batch->first; i < batch->first + batch->count; i++) {
        double share = width * (double)plan->pieces[i].length / (double)batch->num_tokens;
        fprintf(svg,
                "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\" fill=\"%s\" stroke=\"#24292f\" "
                "stroke-width=\"0.4\"/>\n",
                x, y, share, height, fills[color]);
        x += share;
    }
}

static int save_plan(const mt_step_plan *plan, const double *start, double span, const char *title, const char *path,
                     mt_error *error) {
    const double width = 1000, height = 90 + 24 * (double)plan->num_ranks;
    mt_new_file file;
    if (mt_drawing_open(&file, path, width, height, title, error) != 0) return -1;
    FILE *svg = file.stream;
    fprintf(svg,
            "<text x=\"40\" y=\"24\">%s</text>\n<text x=\"40\" y=\"44\">a box: a sample; its height: the ranks that "
            "share it; its width: predicted time</text>\n",
            title);
    for (int64_t rank = 0; rank < plan->num_ranks; rank++)
        fprintf(svg, "<text x=\"32\" y=\"%.1f\" text-anchor=\"end\">%lld</text>\n", 79 + 24 * (double)rank,
                (long long)rank);
    for (int64_t at = 0; at < plan->num_slots * plan->num_ranks; at++) {
        const mt_plan_batch *batch = &plan->batches[plan->batch_of[at]];
        int64_t rank = at % plan->num_ranks;
        double unit = (width - 60) / span;
        if (rank % mt_max(batch->context_size, 1) == 0)
            draw_batch(plan, batch, svg, 40 + unit * start[plan->batch_of[at]], 64 + 24 * (double)rank,
                       unit * batch->work);
    }
    fprintf(svg, "</svg>\n");
    return mt_new_file_close(&file, 0, error);
}

int mt_step_plan_print(const mt_step_plan *plan, bool meets, const char *path, FILE *file, mt_error *error) {
    enum { WIDTH = 100 };
    char title[200], row[WIDTH + 1];
    double *start = mt_calloc(plan->num_batches * 8), work = 0;
    double span = mt_step_plan_time(plan, meets, start);
    for (int64_t b = 0; b < plan->num_batches; b++)
        work += plan->batches[b].work * (double)mt_max(plan->batches[b].context_size, 1);
    snprintf(title, sizeof title,
             "%lld samples on %lld ranks in %lld micro-batches: ranks are idle for %.1f%% of the step",
             (long long)plan->num_pieces, (long long)plan->num_ranks, (long long)plan->num_slots,
             100 - 100 * work / (span * (double)plan->num_ranks));
    fprintf(file, "%s\n\n", title);
    for (int64_t rank = 0; rank < plan->num_ranks; rank++) {
        fill_plan_row(plan, start, span, rank, WIDTH, row);
        fprintf(file, "rank %-4lld %s\n", (long long)rank, row);
    }
    fprintf(file, "\n[4:12] is a micro-batch of 12 samples that 4 ranks share; time is predicted.\n");
    int status = strcmp(path, "-") != 0 ? save_plan(plan, start, span, title, path, error) : 0;
    free(start);
    return status;
}
