/* draw.c: draws the pictures of the notes from the program's own data structures.
 *
 *   usage: draw FOLDER                  (make pictures: draw notes)
 *          draw --schedules FILE.json   (make book: pipeline schedules for the page that chooses one)
 *          draw --steps                 (make pictures: the rows of the planner's picture, for notes/lab.md)
 *
 * Run it in the root of the project, because it reads data/configs. Each picture calls the functions that training
 * calls: a mask is computed by attention, a bucket by the parameter table, a schedule is the list that the training
 * step runs. Such a picture is wrong only if the program is wrong. Curves of costs draw the formulas of their chapter.
 */
#include "../data/base/file.h"
#include "../data/base/safetensors.h"
#include "../data/options/option_rules.h"
#include "../data/options/option_table.h"
#include "../data/options/options.h"
#include "../data/datasets/dataset.h"
#include "../data/datasets/gpt_dataset.h"
#include "../data/datasets/images.h"
#include "../data/datasets/loader.h"
#include "../data/datasets/packing.h"
#include "../data/datasets/sft.h"
#include "../data/checkpoint/run_options.h"
#include "../data/report/report.h"
#include "../data/report/timeline.h"
#include "../data/plan/balance.h"
#include "../data/plan/layouts.h"
#include "../data/plan/simulate.h"
#include "../megatron.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- SVG --------------------------------------------------------------------------------------------------------- */

/* Every picture has an opaque light background, so that it looks the same on a light and on a dark page. */
#define SHEET "#fdfdfb"
#define INK   "#24292f"
#define FAINT "#8a9199"
#define GRID  "#d8dcd6"

static const double letter_width = 6.7;

/* Fills that also differ in lightness, for readers and printers without colours. */
static const char *const fills[] = {"#9cc3e6", "#f4b183", "#a9d18e", "#f2d675", "#c9b3de", "#e59a9a", "#9fd6cf"};
enum { BLUE, ORANGE, GREEN, YELLOW, PURPLE, RED, TEAL, NUM_FILLS };

/* An SVG file being written. Lengths are in pixels. */
typedef struct picture {
    FILE *file; // of `out`
    mt_new_file out;
    int width, height;
} picture;

/* Anchor of a text: its start, middle or end. */
typedef enum anchor { START, MIDDLE, END } anchor;

static void check(int status, const mt_error *error) {
    if (status != 0) mt_die("%s", error->text);
}

/* `name` is also the title of the picture, for screen readers. */
static picture picture_open(const char *folder, const char *name, const char *title, int width, int height) {
    picture p = {.width = width, .height = height};
    char path[1024];
    mt_error error;
    snprintf(path, sizeof path, "%s/%s.svg", folder, name);
    check(mt_new_file_open(&p.out, path, "folder", &error), &error);
    p.file = p.out.stream;
    fprintf(p.file, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\"\n",
            width, height, width, height);
    fprintf(p.file,
            " font-family=\"monospace\" font-size=\"11\" xml:space=\"preserve\" fill=\"%s\">\n<title>%s</title>\n", INK,
            title);
    fprintf(p.file, "<rect width=\"%d\" height=\"%d\" rx=\"8\" fill=\"%s\"/>\n", width, height, SHEET);
    return p;
}

static void picture_close(picture *p) {
    mt_error error;
    fprintf(p->file, "</svg>\n");
    check(mt_new_file_close(&p->out, 0, &error), &error);
}

/* Ends the program if a part of the picture would be cut off. */
static void check_inside(const picture *p, double left, double top, double right, double bottom, const char *part) {
    if (left >= 0 && top >= 0 && right <= p->width && bottom <= p->height) return;
    mt_die("%s: \"%s\" at %.0f to %.0f, %.0f to %.0f is outside the picture of %d x %d", p->out.path, part, left, right,
           top, bottom, p->width, p->height);
}

static void box(picture *p, double x, double y, double width, double height, const char *fill) {
    check_inside(p, x, y, x + width, y + height, "a box");
    fprintf(p->file, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\"/>\n", x, y, width, height,
            fill);
}

/* A box with an outline inside its edges. */
static void frame(picture *p, double x, double y, double width, double height, const char *fill) {
    check_inside(p, x, y, x + width, y + height, "a box");
    fprintf(p->file,
            "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\" stroke=\"%s\" "
            "stroke-width=\"0.6\"/>\n",
            x, y, width, height, fill, INK);
}

static void line(picture *p, double x1, double y1, double x2, double y2, const char *stroke, double width) {
    fprintf(p->file,
            "<path d=\"M%.1f %.1fL%.1f %.1f\" stroke=\"%s\" stroke-width=\"%.1f\" stroke-linecap=\"round\"/>\n", x1, y1,
            x2, y2, stroke, width);
}

/* A bracket above [x1, x2], open at the bottom. */
static void bracket(picture *p, double x1, double x2, double y) {
    fprintf(p->file, "<path d=\"M%.1f %.1fv-5H%.1fv5\" fill=\"none\" stroke=\"%s\"/>\n", x1 + 1, y, x2 - 1, INK);
}

static void text_in(picture *p, const char *colour, double x, double y, anchor anchor, const char *words) {
    static const char *const names[] = {"start", "middle", "end"};
    double width = letter_width * (double)strlen(words), left = x - width * anchor / 2; // anchor 0, 1, 2
    check_inside(p, left, y - 9, left + width, y + 3, words);
    fprintf(p->file, "<text x=\"%.1f\" y=\"%.1f\"", x, y);
    if (anchor != START) fprintf(p->file, " text-anchor=\"%s\"", names[anchor]);
    if (strcmp(colour, INK) != 0) fprintf(p->file, " fill=\"%s\"", colour);
    fprintf(p->file, ">");
    for (; *words; words++) {
        if (*words == '<')
            fputs("&lt;", p->file);
        else if (*words == '&')
            fputs("&amp;", p->file);
        else
            fputc(*words, p->file);
    }
    fprintf(p->file, "</text>\n");
}

static void text(picture *p, double x, double y, anchor anchor, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

static void text(picture *p, double x, double y, anchor anchor, const char *format, ...) {
    char words[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(words, sizeof words, format, arguments);
    va_end(arguments);
    text_in(p, INK, x, y, anchor, words);
}

/* A text that hides what lies below it. */
static void label(picture *p, double x, double y, anchor anchor, const char *words) {
    double width = letter_width * (double)strlen(words);
    box(p, anchor == MIDDLE ? x - width / 2 - 2 : x - 2, y - 10, width + 4, 13, SHEET);
    text_in(p, INK, x, y, anchor, words);
}

/* Formats a count with thousands separators: 15,730,944. Returns `buffer`. */
static const char *grouped(int64_t value, char buffer[32]) {
    char digits[24];
    int count = snprintf(digits, sizeof digits, "%lld", (long long)value), used = 0;
    for (int i = 0; i < count; i++) {
        if (i > 0 && (count - i) % 3 == 0) buffer[used++] = ',';
        buffer[used++] = digits[i];
    }
    buffer[used] = '\0';
    return buffer;
}

/* The options of a training run on mock data, as the command line would set them. */
static void parse_options(mt_run_options *options, const char *const *words, int count) {
    static const char *const common[] = {"train", "--mock-data", "--seq-length", "64", "--micro-batch-size", "4"};
    enum { COMMON = sizeof common / sizeof *common };
    char *arguments[64];
    mt_error error;
    MT_CHECK(COMMON + count <= 64);
    for (int i = 0; i < COMMON + count; i++) arguments[i] = (char *)(i < COMMON ? common[i] : words[i - COMMON]);
    check(mt_options_parse(options, MT_PROGRAM_TRAIN, COMMON + count, arguments, &error), &error);
    check(mt_options_finish(options, MT_PROGRAM_TRAIN, 1, &error), &error);
}

/* Loads a model shape from data/configs. */
static void open_shape(mt_run_options *options, const char *config) {
    const char *const words[] = {"--hf-config", config, "--global-batch-size", "4", "--train-iters", "1",
                                 "--lr",        "1e-3"};
    parse_options(options, words, sizeof words / sizeof *words);
}

/* ---- 0: the ranks of notes/mini.c -------------------------------------------------------------------------------- */

/* `parts` boxes; the ones in the set of bits `held` are filled. */
static void draw_strip(picture *p, double x, double y, int parts, unsigned held, const char *fill) {
    const double width = 136.0 / parts;
    for (int i = 0; i < parts; i++) frame(p, x + width * i, y, width, 22, held >> i & 1 ? fill : "#ffffff");
}

/* The other member of a group of two. */
static int partner(const mt_grid_shape *shape, mt_group_kind kind, int rank) {
    int members[8];
    MT_CHECK(mt_grid_members(members, shape, kind, rank) == 2);
    return members[0] + members[1] - rank;
}

static void draw_mini(const char *folder) {
    enum { RANKS = 8, COLUMNS = 4 };
    static const char *const titles[COLUMNS] = {"layers", "heads, MLP, vocabulary", "chunks of the sequence",
                                                "its optimizer state"};
    static const int parts[COLUMNS] = {4, 2, 4, 2}, fill[COLUMNS] = {BLUE, ORANGE, GREEN, PURPLE};
    const mt_grid_shape shape = {.tensor = 2,
                                 .context = 2,
                                 .data = 1,
                                 .pipeline = 2,
                                 .expert_tensor = 1,
                                 .expert = 1,
                                 .expert_data = 4,
                                 .num_query_groups = 2};
    picture p = picture_open(folder, "00-ranks", "What each of eight ranks holds", 900, 356);
    text(&p, 20, 26, START,
         "8 ranks: TP 2 x CP 2 x PP 2, two virtual stages a rank. Parts of the whole that each rank holds:");
    for (int i = 0; i < COLUMNS; i++) text(&p, 80 + 160 * i, 54, START, "%s", titles[i]);
    text(&p, 736, 54, START, "exchanges with");
    for (int rank = 0; rank < RANKS; rank++) {
        int tensor = partner(&shape, MT_GROUP_TENSOR, rank), context = partner(&shape, MT_GROUP_CONTEXT, rank);
        int pipeline = partner(&shape, MT_GROUP_PIPELINE, rank);
        int t = tensor < rank, c = context < rank, stage = pipeline < rank;
        const unsigned held[COLUMNS] = {5u << stage, 1u << t, 1u << c | 1u << (3 - c), 1u << c};
        double y = 66 + 34 * rank;
        text(&p, 66, y + 15, END, "rank %d", rank);
        for (int i = 0; i < COLUMNS; i++) draw_strip(&p, 80 + 160 * i, y, parts[i], held[i], fills[fill[i]]);
        text(&p, 736, y + 15, START, "tp %d  cp %d  pp %d", tensor, context, pipeline);
    }
    picture_close(&p);
}

/* ---- 1: attention masks ------------------------------------------------------------------------------------------ */

/* A string of letters as a dataset; a full stop ends a document. */
#define LETTERS "we.eat.the.sun.up"

static int letters_get(const mt_dataset *dataset, int64_t index, int32_t *tokens, mt_error *error) {
    (void)error;
    for (int64_t i = 0; i <= dataset->seq_length; i++) tokens[i] = LETTERS[index * dataset->seq_length + i];
    return 0;
}

/* The batch of all 16 letters, made by the loader. */
static void letters_batch(mt_batch *batch, int64_t seq_length, bool reset_attention_mask) {
    mt_dataset dataset = {.num_samples = 16 / seq_length, .seq_length = seq_length, .get = letters_get};
    mt_data_config config = {.seq_length = seq_length, .vocab_size = 128, .eod_id = '.'};
    config.reset_attention_mask = reset_attention_mask;
    mt_loader *loader;
    mt_error error;
    check(mt_loader_open(&loader, &dataset, &config, dataset.num_samples, 0, 1, &error), &error);
    mt_batch_alloc(batch, 16);
    check(mt_loader_fill(loader, 0, batch, &error), &error);
    mt_loader_close(loader);
}

/* Computes seen[rows, keys]: the keys that each query attends to. Queries and keys are zero, so a query weights all
 * visible keys equally. Values are the identity matrix, so the output is the matrix of weights. */
static void attention_sees(bool *seen, const mt_span *spans, int64_t num_spans, int64_t rows, int64_t keys,
                           int64_t window) {
    enum { HEAD_SIZE = 8 };
    float *zeros = mt_calloc((rows + keys) * HEAD_SIZE * 4), *identity = mt_calloc(keys * keys * 4);
    float *out = mt_calloc(rows * keys * 4), *lse = mt_calloc(rows * 4);
    for (int64_t i = 0; i < keys; i++) identity[i * keys + i] = 1;
    mt_attention call = {.num_heads = 1, .num_groups = 1, .head_size = HEAD_SIZE, .value_size = keys, .scale = 1};
    call.q = call.k = zeros, call.v = identity, call.out = out, call.lse = lse;
    call.q_stride = call.k_stride = HEAD_SIZE;
    call.v_stride = call.out_stride = keys;
    call.spans = (mt_spans){.host = spans, .device = spans, .count = num_spans};
    call.window = window;
    mt_cpu_ops.attention_forward(&call, MT_F32, NULL);
    for (int64_t i = 0; i < rows * keys; i++) seen[i] = out[i] > 0;
    free(zeros), free(identity), free(out), free(lse);
}

/* Draws a mask as a grid in the colour of each span: query rows downwards, keys to the right. Consecutive keys form one
 * box. */
static void draw_mask(picture *p, double x, double y, double cell, const mt_span *spans, int64_t num_spans,
                      int64_t rows, int64_t keys, int64_t window) {
    bool *seen = mt_calloc(rows * keys);
    attention_sees(seen, spans, num_spans, rows, keys, window);
    box(p, x, y, cell * (double)keys, cell * (double)rows, "#ffffff");
    for (int64_t s = 0; s < num_spans; s++)
        for (int64_t i = spans[s].q_start; i < spans[s].q_start + spans[s].q_len; i++)
            for (int64_t j = 0, end; j < keys; j = end) {
                for (end = j + 1; end < keys && seen[i * keys + end] == seen[i * keys + j];) end++;
                if (seen[i * keys + j])
                    box(p, x + cell * (double)j, y + cell * (double)i, cell * (double)(end - j), cell,
                        fills[s % NUM_FILLS]);
            }
    for (int64_t i = 0; i <= rows; i++)
        line(p, x, y + cell * (double)i, x + cell * (double)keys, y + cell * (double)i, GRID, 0.6);
    for (int64_t j = 0; j <= keys; j++)
        line(p, x + cell * (double)j, y, x + cell * (double)j, y + cell * (double)rows, GRID, 0.6);
    free(seen);
}

/* Draws a batch of letters: its mask, and its spans below. */
static void draw_batch(picture *p, double x, double y, const char *title, const mt_batch *batch, int64_t window) {
    const double cell = 15;
    text(p, x, y - 24, START, "%s", title);
    for (int64_t i = 0; i < batch->num_tokens; i++) {
        text(p, x + cell * ((double)i + 0.5), y - 5, MIDDLE, "%c", (char)batch->tokens[i]);
        text(p, x - 8, y + cell * ((double)i + 0.75), MIDDLE, "%c", (char)batch->tokens[i]);
    }
    draw_mask(p, x, y, cell, batch->spans, batch->num_spans, batch->num_tokens, batch->num_tokens, window);
    for (int64_t s = 0; s < batch->num_spans; s++) {
        const mt_span *span = &batch->spans[s];
        double below = y + cell * (double)batch->num_tokens + 18 + 15 * (double)s;
        box(p, x, below - 9, 10, 10, fills[s % NUM_FILLS]);
        text(p, x + 16, below, START, "q %lld+%lld  k %lld+%lld  causal", (long long)span->q_start,
             (long long)span->q_len, (long long)span->k_start, (long long)span->k_len);
    }
}

/* Draws decoding: two sequences continue by one token each; a third, between them, reads its prompt of four tokens. */
static void draw_decoding(picture *p, double x, double y) {
    const double cell = 15;
    static const mt_span spans[] = {{0, 1, 0, 6, true}, {1, 4, 8, 4, true}, {5, 1, 16, 8, true}};
    static const char *const what[] = {"a token after 5 cached", "a prompt of 4", "a token after 7 cached"};
    enum { SLOT = 8, SPANS = 3 };
    text(p, x, y - 24, START, "decoding: T = 6 rows, keys in a cache of 3 x %d rows", SLOT);
    for (int s = 0; s < SPANS; s++)
        for (int j = 0; j < SLOT; j++) text(p, x + cell * (s * SLOT + j + 0.5), y - 5, MIDDLE, "%d", j);
    draw_mask(p, x, y, cell, spans, SPANS, 6, SPANS * SLOT, 0);
    for (int s = 1; s < SPANS; s++) line(p, x + cell * s * SLOT, y - 14, x + cell * s * SLOT, y + cell * 6, INK, 1);
    for (int s = 0; s < SPANS; s++) {
        double at = x + cell * SPANS * SLOT + 30, below = y + 24 + 22 * (double)s;
        box(p, at, below - 9, 10, 10, fills[s]);
        text(p, at + 16, below, START, "q %lld+%lld  k %lld+%lld  causal   %s", (long long)spans[s].q_start,
             (long long)spans[s].q_len, (long long)spans[s].k_start, (long long)spans[s].k_len, what[s]);
    }
}

static void draw_masks(const char *folder) {
    picture p = picture_open(folder, "01-spans", "Attention masks of span lists", 900, 560);
    mt_batch batch;
    letters_batch(&batch, 8, false);
    draw_batch(&p, 40, 50, "two sequences of 8 tokens", &batch, 0);
    mt_batch_free(&batch);
    letters_batch(&batch, 8, true);
    draw_batch(&p, 335, 50, "the same, --reset-attention-mask", &batch, 0);
    mt_batch_free(&batch);
    letters_batch(&batch, 16, false);
    draw_batch(&p, 630, 50, "one of 16, a window of 4", &batch, 4);
    mt_batch_free(&batch);
    text_in(&p, FAINT, 630, 345, START, "a row is a query, a column a key");
    draw_decoding(&p, 40, 450);
    picture_close(&p);
}

/* ---- 2: a layer's bucket ----------------------------------------------------------------------------------------- */

/* The parameter table of a model and the number of elements of each bucket. */
typedef struct table {
    mt_param *rows;
    int64_t count, num_buckets;
    int64_t *sizes; // [num_buckets]
} table;

static table table_open(const mt_options *options) {
    table t = {0};
    t.count = mt_params_build(&t.rows, options, NULL);
    t.num_buckets = t.rows[t.count - 1].bucket + 1;
    t.sizes = mt_calloc(t.num_buckets * (int64_t)sizeof *t.sizes);
    for (int64_t i = 0; i < t.count; i++)
        t.sizes[t.rows[i].bucket] = t.rows[i].offset + t.rows[i].rows * t.rows[i].cols;
    return t;
}

static void table_close(table *t) {
    free(t->rows);
    free(t->sizes);
}

static const mt_param *table_find(const table *t, mt_role role) {
    for (int64_t i = 0; i < t->count; i++)
        if (t->rows[i].role == role && t->rows[i].layer <= 0) return &t->rows[i];
    return NULL;
}

/* The part of a tensor's name between the layer and the kind: "self_attn.q_proj". */
static const char *short_name(const mt_param *param, char *name, size_t size) {
    const char *start = strstr(param->hf_name, "layers.0.");
    snprintf(name, size, "%s", start ? start + 9 : param->hf_name);
    char *end = strstr(name, ".weight");
    if (end) *end = '\0';
    char *dot = strrchr(name, '.');
    return dot ? dot + 1 : name;
}

/* Draws the rows of bucket 1 from element `first` to `last`, to scale in [x, x + width]. */
static void draw_stretch(picture *p, const table *t, int64_t first, int64_t last, double x, double y, double width) {
    double scale = width / (double)(last - first);
    int colour = 0;
    for (int64_t i = 0; i < t->count; i++) {
        const mt_param *param = &t->rows[i];
        char name[160];
        if (param->bucket != 1 || param->offset < first || param->offset >= last) continue;
        double left = x + scale * (double)(param->offset - first), w = scale * (double)(param->rows * param->cols);
        frame(p, left, y, w, 46, fills[colour++ % NUM_FILLS]);
        bool narrow = w < 80 && !param->is_vector;
        text(p, left + w / 2, y + (narrow ? 14 : 18), MIDDLE, "%s", short_name(param, name, sizeof name));
        if (narrow) text(p, left + w / 2, y + 28, MIDDLE, "[%lld,", (long long)param->rows);
        if (param->is_vector)
            text(p, left + w / 2, y + 36, MIDDLE, "%lld", (long long)param->rows);
        else if (narrow)
            text(p, left + w / 2, y + 41, MIDDLE, "%lld]", (long long)param->cols);
        else
            text(p, left + w / 2, y + 36, MIDDLE, "[%lld, %lld]", (long long)param->rows, (long long)param->cols);
    }
}

/* A bracket over adjacent parameters that one matrix product reads as one matrix. */
static void draw_fused(picture *p, const table *t, mt_role first, mt_role last, double x, double y, double scale) {
    const mt_param *a = table_find(t, first), *b = table_find(t, last);
    int64_t end = b->offset + b->rows * b->cols;
    double left = x + scale * (double)a->offset, right = x + scale * (double)end;
    char words[64];
    snprintf(words, sizeof words, "one product: w[%lld, %lld]", (long long)((end - a->offset) / a->cols),
             (long long)a->cols);
    bracket(p, left, right, y - 4);
    label(p, (left + right) / 2, y - 14, MIDDLE, words);
}

/* Draws the bytes of one parameter: one box per array of the bucket. */
static void draw_bytes(picture *p, double x, double y, const char *title, const char *const *names, const int *bytes,
                       int count) {
    const double per_byte = 21;
    int total = 0;
    for (int i = 0; i < count; i++) {
        frame(p, x + per_byte * total, y, per_byte * bytes[i], 26, fills[i % NUM_FILLS]);
        text(p, x + per_byte * (total + 0.5 * bytes[i]), y + 17, MIDDLE, "%s", names[i]);
        total += bytes[i];
    }
    text(p, x, y - 7, START, "%s: %d bytes per parameter", title, total);
}

/* Draws all buckets of the model side by side, to scale. */
static void draw_buckets(picture *p, const table *t, double x, double y, double width) {
    int64_t total = 0, before = 0;
    for (int64_t b = 0; b < t->num_buckets; b++) total += t->sizes[b];
    double scale = width / (double)total;
    for (int64_t b = 0; b < t->num_buckets; b++) {
        double left = x + scale * (double)before, w = scale * (double)t->sizes[b];
        frame(p, left, y, w, 22, b == 0 ? fills[TEAL] : b == 1 ? fills[YELLOW] : "#eceee9");
        if (b == 0) text(p, left + w / 2, y + 15, MIDDLE, "0: embedding");
        before += t->sizes[b];
    }
    text(p, x + width, y - 7, END, "%lld: final norm", (long long)t->num_buckets - 1);
}

/* Draws the same memory in two rows, the second enlarged. */
static void draw_lens(picture *p, double x1, double x2, double y1, double left, double right, double y2) {
    line(p, x1, y1, left, y2, FAINT, 0.6);
    line(p, x2, y1, right, y2, FAINT, 0.6);
}

static void draw_bucket(const char *folder) {
    static const char *const fp32[] = {"params", "grads", "m", "v"};
    static const char *const bf16[] = {"params", "grads", "master", "m", "v"};
    const double x = 25, width = 850;
    char a[32], b[32];
    mt_run_options options;
    open_shape(&options, "data/configs/qwen3-0.6b.json");
    table t = table_open(&options.stack);
    int64_t decay = 0, size = t.sizes[1], all = t.sizes[0] + size * options.stack.num_layers;
    for (int64_t i = 0; i < t.count; i++)
        if (t.rows[i].bucket == 1 && t.rows[i].weight_decay) decay = t.rows[i].offset + t.rows[i].rows * t.rows[i].cols;

    picture p = picture_open(folder, "02-bucket", "A layer's bucket as a memory map", 900, 510);
    text(&p, x, 28, START, "Qwen3 0.6B: %s parameters in %lld buckets", grouped(mt_num_parameters(&options.stack), a),
         (long long)t.num_buckets);
    draw_buckets(&p, &t, x, 52, width);
    double first = x + width * (double)t.sizes[0] / (double)all, scale = width / (double)size;
    draw_lens(&p, first, first + width * (double)size / (double)all, 76, x, x + width, 148);
    draw_fused(&p, &t, MT_Q, MT_V, x, 150, scale);
    draw_fused(&p, &t, MT_GATE, MT_UP, x, 150, scale);
    draw_stretch(&p, &t, 0, decay, x, 150, scale * (double)decay);
    text(&p, x, 214, START, "bucket 1, layer 0: %s elements; the first %s, its matrices, decay", grouped(size, a),
         grouped(decay, b));
    draw_lens(&p, x + scale * (double)decay, x + width, 198, x, x + width, 268);
    draw_stretch(&p, &t, decay, size, x, 270, width);
    text(&p, x, 334, START, "the last %s, its vectors, do not decay", grouped(size - decay, a));
    draw_bytes(&p, x, 384, "fp32", fp32, (const int[]){4, 4, 4, 4}, 4);
    draw_bytes(&p, x, 454, "--bf16", bf16, (const int[]){2, 4, 4, 4, 4}, 5);
    text(&p, x + 400, 401, START, "x %s = %.0f MiB for this layer", grouped(size, a), 16 * (double)size / 1048576);
    text(&p, x + 400, 471, START, "x %s = %.0f MiB", grouped(size, a), 18 * (double)size / 1048576);
    picture_close(&p);
    table_close(&t);
    mt_options_free(&options);
}

/* ---- 3: the data flow of a layer --------------------------------------------------------------------------------- */

/* A tensor of a layer's forward, the operation that writes it, and the operation that writes its gradient. */
typedef struct flow {
    const char *forward, *tensor;
    int64_t width; // elements per token
    bool saved;
    const char *backward;
} flow;

/* The tensors of a layer with RMSNorm, q/k norm and SwiGLU. Widths are those of the matrices in the parameter table. */
static int layer_flow(flow *flows, const table *t) {
    int64_t C = table_find(t, MT_O)->rows, q = table_find(t, MT_Q)->rows, k = table_find(t, MT_K)->rows;
    int64_t v = table_find(t, MT_V)->rows, gate = table_find(t, MT_GATE)->rows, up = table_find(t, MT_UP)->rows;
    const flow rows[] = {
        {"", "input", C, true, "rmsnorm_backward, + residual"},
        {"rmsnorm", "input_normed", C, true, "linear_backward (qkv)"},
        {"linear (q k v)", "qkv", q + k + v, true, "rmsnorm_backward of the heads"},
        {"rmsnorm of the heads, rope", "qk", q + k, true, "attention_backward, rope_backward"},
        {"attention", "attended", q, true, "linear_backward (o)"},
        {"linear (o)", "hidden", C, false, "dropout_add_backward"},
        {"dropout_add", "middle", C, true, "rmsnorm_backward, + residual"},
        {"rmsnorm", "mlp_normed", C, true, "linear_backward (gate up)"},
        {"linear (gate up)", "mlp_hidden", gate + up, true, "activation_backward"},
        {"swiglu", "mlp_active", gate, true, "linear_backward (down)"},
        {"linear (down)", "hidden", C, false, "dropout_add_backward"},
        {"dropout_add", "the next layer's input", C, false, "the next layer's backward"},
    };
    memcpy(flows, rows, sizeof rows);
    return (int)(sizeof rows / sizeof *rows);
}

/* The residual stream bypasses the operations: a line at the left edge from one row's bar to another's. */
static void draw_residual(picture *p, double x, double side, double y1, double y2) {
    fprintf(p->file,
            "<path d=\"M%.1f %.1fH%.1fV%.1fH%.1fm-5 -3l5 3l-5 3\" fill=\"none\" stroke=\"%s\" "
            "stroke-width=\"1.2\"/>\n",
            x, y1, side, y2, x, INK);
}

static void draw_layer(const char *folder) {
    mt_run_options options;
    open_shape(&options, "data/configs/qwen3-0.6b.json");
    table t = table_open(&options.stack);
    flow flows[16];
    char a[32], b[32];
    int count = layer_flow(flows, &t);
    const double x = 380, step = 34, top = 74, scale = 250.0 / 6144;
    int64_t saved = 0;
    picture p = picture_open(folder, "03-layer", "The data flow of a layer", 900, 540);
    text(&p, 20, 28, START, "A layer of Qwen3 0.6B: T tokens of n elements between its operations");
    text_in(&p, FAINT, 20, 56, START, "forward, downwards");
    text_in(&p, FAINT, x, 56, MIDDLE, "tensor");
    text_in(&p, FAINT, 660, 56, START, "backward, upwards");
    for (int i = 0; i < count; i++) {
        double y = top + step * i, w = scale * (double)flows[i].width;
        if (i > 0) text(&p, 20, y - 3, START, "%s", flows[i].forward);
        if (i > 0) line(&p, x, y - 10, x, y, INK, 1);
        frame(&p, x - w / 2, y, w, 18, flows[i].saved ? fills[BLUE] : "#ffffff");
        text(&p, x + (w > 190 ? 0 : w / 2 + 8), y + 13, w > 190 ? MIDDLE : START, "%s [T, %lld]", flows[i].tensor,
             (long long)flows[i].width);
        text(&p, 660, y + 13, START, "%s", flows[i].backward);
        if (flows[i].saved) saved += flows[i].width;
    }
    double left = x - scale * (double)flows[0].width / 2;
    draw_residual(&p, left, x - 145, top + 9, top + step * 6 + 5);
    draw_residual(&p, left, x - 145, top + step * 6 + 13, top + step * 11 + 9);
    box(&p, 20, 500, 10, 10, fills[BLUE]);
    text(&p, 36, 509, START,
         "saved for the backward: %s elements per token, %s bytes in fp32; white: not saved by this layer",
         grouped(saved, a), grouped(saved * 4, b));
    picture_close(&p);
    table_close(&t);
    mt_options_free(&options);
}

/* ---- 4: bytes and samples ---------------------------------------------------------------------------------------- */

/* A temporary pair of dataset files. */
typedef struct small_data {
    char prefix[1024];
    mt_indexed_dataset *indexed;
    uint8_t *idx, *bin;
    int64_t idx_size, bin_size;
} small_data;

static uint8_t *read_whole(const char *path, int64_t *size) {
    mt_mapping mapping;
    mt_error error;
    check(mt_mapping_open(&mapping, path, &error), &error);
    uint8_t *bytes = mt_malloc(mapping.size);
    if (mapping.size > 0) memcpy(bytes, mapping.bytes, (size_t)mapping.size);
    *size = mapping.size;
    mt_mapping_close(&mapping);
    return bytes;
}

/* Writes the documents, which are consecutive in `tokens`, one sequence each; then opens them as training does. */
static void small_data_open(small_data *data, const char *folder, const int32_t *tokens, const int32_t *lengths,
                            int count) {
    mt_indexed_writer *writer;
    mt_error error;
    char path[1100];
    snprintf(data->prefix, sizeof data->prefix, "%s/draw-%ld", folder, (long)getpid());
    check(mt_indexed_writer_open(&writer, data->prefix, mt_indexed_dtype_for_vocab(257), &error), &error);
    for (int i = 0; i < count; tokens += lengths[i++])
        check(mt_indexed_writer_add_document(writer, tokens, &lengths[i], 1, &error), &error);
    check(mt_indexed_writer_seal(writer, &error), &error);
    check(mt_indexed_writer_publish(writer, &error), &error);
    mt_indexed_writer_close(writer);
    snprintf(path, sizeof path, "%s.idx", data->prefix);
    data->idx = read_whole(path, &data->idx_size);
    int status = mt_indexed_dataset_open(&data->indexed, data->prefix, &error);
    unlink(path); // an open file stays readable
    snprintf(path, sizeof path, "%s.bin", data->prefix);
    data->bin = read_whole(path, &data->bin_size);
    unlink(path);
    check(status, &error);
}

static void small_data_close(small_data *data) {
    mt_indexed_dataset_close(data->indexed);
    free(data->idx);
    free(data->bin);
}

/* A byte range and its meaning. */
typedef struct field {
    int64_t size;
    const char *name;
    char value[64];
} field;

/* Appends the items of an array of 4- or 8-byte integers to a field's value. */
static void list_items(field *f, const uint8_t *items, int64_t count, int64_t item_size) {
    f->size = count * item_size;
    for (int64_t i = 0; i < count; i++) {
        int64_t value = 0;
        memcpy(&value, items + i * item_size, (size_t)item_size); // little-endian
        size_t used = strlen(f->value);
        snprintf(f->value + used, sizeof f->value - used, "%s%lld", i ? ", " : "", (long long)value);
    }
}

/* The fields of an .idx file in order; returns their number. */
static int index_fields(field *fields, const mt_indexed_index *index) {
    int64_t n = index->num_sequences;
    field header[] = {{9, "magic", "MMIDIDX\\0\\0"},
                      {8, "version, u64", "1"},
                      {1, "token type", ""},
                      {8, "sequences, u64", ""},
                      {8, "documents + 1, u64", ""},
                      {0, "lengths, i32", ""},
                      {0, "byte offsets in .bin, i64", ""},
                      {0, "document index, i64", ""}};
    snprintf(header[2].value, sizeof header[2].value, "8: %s", index->dtype == MT_U16 ? "u16" : "another");
    snprintf(header[3].value, sizeof header[3].value, "%lld", (long long)n);
    snprintf(header[4].value, sizeof header[4].value, "%lld", (long long)index->num_documents + 1);
    list_items(&header[5], index->lengths, n, 4);
    list_items(&header[6], index->offsets, n, 8);
    list_items(&header[7], index->documents, index->num_documents + 1, 8);
    memcpy(fields, header, sizeof header);
    return (int)(sizeof header / sizeof *header);
}

/* Draws bytes in rows of 16, each in the colour of its field, with the fields' values beside them. Returns the
 * height. */
static double draw_hex(picture *p, double x, double y, const uint8_t *bytes, const field *fields, int count) {
    const double cell = 25, height = 19;
    int64_t at = 0;
    for (int f = 0; f < count; f++) {
        const char *fill = fills[f % NUM_FILLS];
        double beside = y + height * f;
        box(p, x + 16 * cell + 20, beside + 4, 10, 10, fill);
        text(p, x + 16 * cell + 36, beside + 13, START, "byte %3lld  %-26s %s", (long long)at, fields[f].name,
             fields[f].value);
        for (int64_t end = at + fields[f].size; at < end; at++) {
            double left = x + cell * (double)(at % 16), down = y + height * (double)(at / 16);
            box(p, left, down, cell - 1, height - 1, fill);
            text(p, left + cell / 2, down + 13, MIDDLE, "%02x", bytes[at]);
        }
    }
    int64_t rows = (at + 15) / 16;
    for (int64_t row = 0; row < rows; row++)
        text(p, x - 8, y + height * (double)row + 13, END, "%lld", (long long)row * 16);
    return height * (double)(rows > count ? rows : count);
}

static void draw_index(const char *folder) {
    static const int32_t tokens[] = {'H', 'i', 256, 'w', 'e', ' ', 'a', 't', 'e', 256, 'o', 'k', 256};
    static const int32_t lengths[] = {3, 7, 3};
    static const char *const names[] = {"document 0", "document 1", "document 2"};
    static const char *const words[] = {"H i 256", "w e _ a t e 256", "o k 256"};
    small_data data = {0};
    small_data_open(&data, folder, tokens, lengths, 3);
    const mt_indexed_index *index = mt_indexed_dataset_index(data.indexed);
    field fields[8], documents[3];
    int count = index_fields(fields, index);
    picture p = picture_open(folder, "04-index", "Every byte of a small dataset", 900, 300);
    text(&p, 50, 28, START, "small_text_document.idx, %lld bytes", (long long)data.idx_size);
    double y = 40 + draw_hex(&p, 50, 40, data.idx, fields, count);

    for (int i = 0; i < 3; i++) {
        documents[i] = (field){.size = lengths[i] * 2, .name = names[i]};
        snprintf(documents[i].value, sizeof documents[i].value, "%s", words[i]);
    }
    text(&p, 50, y + 28, START, "small_text_document.bin, %lld bytes", (long long)data.bin_size);
    draw_hex(&p, 50, y + 40, data.bin, documents, 3);
    picture_close(&p);
    small_data_close(&data);
}

/* ---- samples ---- */

enum { DOCUMENTS = 6, SEQ_LENGTH = 8, MAX_SAMPLES = 16 };
static const int32_t document_lengths[DOCUMENTS] = {9, 5, 12, 4, 7, 8};

/* A token encodes its position: 32 times the document plus the position in it. */
static int64_t numbered_documents(int32_t *tokens) {
    int64_t count = 0;
    for (int d = 0; d < DOCUMENTS; d++)
        for (int i = 0; i < document_lengths[d]; i++) tokens[count++] = 32 * d + i;
    return count;
}

/* Draws a cell per token, in the colour of its document, with its position in the document. */
static void draw_tokens(picture *p, double x, double y, double cell, const int32_t *tokens, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        box(p, x + cell * (double)i, y, cell - 1, 20, fills[tokens[i] / 32 % NUM_FILLS]);
        text(p, x + cell * ((double)i + 0.5), y + 14, MIDDLE, "%d", (int)(tokens[i] % 32));
    }
}

/* Sorts the samples of one epoch into stream order: each begins with the last token of the preceding one. */
static void stream_order(int *order, int32_t samples[][SEQ_LENGTH + 1], int count) {
    for (int i = 0; i < count; i++) { // finds the first: no other sample ends with its first token
        bool follows = false;
        for (int j = 0; j < count; j++) follows |= samples[j][SEQ_LENGTH] == samples[i][0];
        if (!follows) order[0] = i;
    }
    for (int place = 1; place < count; place++)
        for (int j = 0; j < count; j++)
            if (samples[j][0] == samples[order[place - 1]][SEQ_LENGTH]) order[place] = j;
}

static void draw_stream(picture *p, double x, double cell, int32_t samples[][SEQ_LENGTH + 1], int count,
                        int64_t num_tokens) {
    int order[MAX_SAMPLES] = {0};
    int32_t stream[MAX_SAMPLES * SEQ_LENGTH + 1] = {0};
    stream_order(order, samples, count);
    for (int s = 0; s < count; s++) memcpy(stream + s * SEQ_LENGTH, samples[order[s]], sizeof samples[0]);
    int64_t used = count * SEQ_LENGTH + 1;
    text(p, x, 128, START, "one epoch: documents shuffled, end to end");
    draw_tokens(p, x, 136, cell, stream, used);
    for (int64_t i = used; i < num_tokens; i++) frame(p, x + cell * (double)i, 136, cell - 1, 20, SHEET);
    text(p, x + cell * (double)used, 172, START, "left over");
    char title[96];
    for (int s = 0; s < count; s++)
        line(p, x + cell * s * SEQ_LENGTH, 158, x + cell * s * SEQ_LENGTH, 212 + 24 * order[s], GRID, 0.6);
    snprintf(title, sizeof title, "samples of %d + 1 tokens, in the order in which training reads them", SEQ_LENGTH);
    label(p, x, 200, START, title);
    for (int s = 0; s < count; s++) {
        double y = 212 + 24 * order[s];
        draw_tokens(p, x + cell * s * SEQ_LENGTH, y, cell, samples[order[s]], SEQ_LENGTH + 1);
        text(p, x - 6, y + 14, END, "%d", order[s]);
    }
}

static void draw_samples(const char *folder) {
    int32_t tokens[64], samples[MAX_SAMPLES][SEQ_LENGTH + 1];
    int64_t count = numbered_documents(tokens);
    small_data data = {0};
    mt_dataset *dataset;
    mt_error error;
    mt_data_config config = {.seq_length = SEQ_LENGTH, .vocab_size = 32 * DOCUMENTS, .seed = 1234};
    small_data_open(&data, folder, tokens, document_lengths, DOCUMENTS);
    check(mt_gpt_dataset_create(&dataset, data.indexed, 0, DOCUMENTS, -1, &config, &error), &error);
    int num_samples = (int)dataset->num_samples;
    MT_CHECK(num_samples <= MAX_SAMPLES);
    for (int i = 0; i < num_samples; i++) check(mt_dataset_get(dataset, i, samples[i], &error), &error);

    const double x = 40, cell = 18;
    picture p = picture_open(folder, "04-samples", "From documents to samples", 900, 350);
    text(&p, x, 28, START, "six documents in the file, %lld tokens", (long long)count);
    draw_tokens(&p, x, 44, cell, tokens, count);
    for (int d = 0, before = 0; d < DOCUMENTS; before += document_lengths[d++])
        text(&p, x + cell * before, 80, START, "doc %d", d);
    draw_stream(&p, x, cell, samples, num_samples, count);
    picture_close(&p);
    mt_dataset_free(dataset);
    small_data_close(&data);
}

/* ---- 5: schedules ------------------------------------------------------------------------------------------------ */

/* Draws one schedule over time, with its bubble. `unit` is the width of a stage's forward in pixels; a backward is
 * twice as wide. */
static void draw_timeline(picture *p, double x, double y, double unit, const mt_schedule *schedule, const char *name) {
    const double part = 1 / (double)schedule->vp;
    const mt_action_costs costs = {part, part, part, 0};
    mt_timeline t;
    MT_CHECK(mt_timeline_create(&t, schedule, &costs, 0) == 0);
    double work = 3 * (double)schedule->micro_batches;
    text(p, x, y - 10, START, "%s: %.4g of %.4g units idle, %.1f%% of the work", name, t.span - work, t.span,
         100 * t.bubble);
    mt_timeline_draw(&t, p->file, x, y, unit);
    mt_timeline_free(&t);
}

static void draw_schedule(const char *folder) {
    const mt_schedule one = {MT_SCHEDULE_1F1B, 1, 1, 8, 0}, four = {MT_SCHEDULE_1F1B, 4, 1, 8, 0};
    picture p = picture_open(folder, "05-schedule", "1F1B schedules", 900, 290);
    text(&p, 20, 28, START,
         "forwards (1 unit) and backwards (2 units) by micro-batch; left: rank; right: live micro-batches");
    box(&p, 20, 40, 10, 10, fills[BLUE]);
    text(&p, 36, 49, START, "forward");
    box(&p, 110, 40, 10, 10, fills[GREEN]);
    text(&p, 126, 49, START, "backward");
    draw_timeline(&p, 40, 90, 23, &one, "pp = 1, 8 micro-batches");
    draw_timeline(&p, 40, 160, 23, &four, "pp = 4, 8 micro-batches");
    picture_close(&p);
}

/* ---- learning rates ---- */

enum { ITERATIONS = 100 };

/* A run of 100 iterations with a warm-up of 10. */
static void open_rates(mt_run_options *options, const char *style) {
    // clang-format off
    const char *const words[] = {
        "--num-layers", "1", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "256",
        "--max-position-embeddings", "64", "--train-iters", "100", "--global-batch-size", "4", "--lr", "1e-3",
        "--min-lr", "1e-4", "--lr-warmup-iters", "10", "--lr-decay-style", style,
        "--lr-wsd-decay-style", "linear", "--lr-wsd-decay-iters", "30"};
    // clang-format on
    int count = sizeof words / sizeof *words;
    parse_options(options, words, strcmp(style, "WSD") == 0 ? count : count - 4);
}

static void draw_curve(picture *p, const mt_options *options, const char *stroke, double x, double y, double width,
                       double height) {
    fprintf(p->file, "<path d=\"");
    for (int64_t i = 0; i <= ITERATIONS; i++) {
        double rate = mt_learning_rate(options, i * options->global_batch_size);
        fprintf(p->file, "%c%.1f %.1f", i ? 'L' : 'M', x + width * (double)i / ITERATIONS,
                y + height * (1 - rate / 1e-3));
    }
    fprintf(p->file, "\" fill=\"none\" stroke=\"%s\" stroke-width=\"2\"/>\n", stroke);
}

static void draw_rates(const char *folder) {
    static const char *const styles[] = {"constant", "inverse-square-root", "WSD", "linear", "cosine"};
    static const char *const strokes[] = {"#5b6470", "#b8860b", "#2e7d32", "#c0561a", "#2f6db0"};
    const double x = 70, y = 40, width = 560, height = 220;
    picture p = picture_open(folder, "05-rates", "Learning-rate schedules", 900, 310);
    for (int i = 0; i <= 10; i += 2) {
        double across = y + height * (1 - i / 10.0);
        line(&p, x, across, x + width, across, GRID, 0.6);
        text(&p, x - 8, across + 4, END, "%.1fe-3", i / 10.0);
    }
    for (int i = 0; i <= ITERATIONS; i += 20) text(&p, x + width * i / ITERATIONS, y + height + 18, MIDDLE, "%d", i);
    text(&p, x + width / 2, y + height + 36, MIDDLE, "iteration");
    text(&p, x - 55, y - 14, START, "learning rate");
    for (int s = 0; s < 5; s++) {
        mt_run_options options;
        open_rates(&options, styles[s]);
        draw_curve(&p, &options.stack, strokes[s], x, y, width, height);
        line(&p, x + width + 30, y + 14 + 24 * s, x + width + 54, y + 14 + 24 * s, strokes[s], 2);
        text(&p, x + width + 62, y + 18 + 24 * s, START, "%s", styles[s]);
        mt_options_free(&options);
    }
    text(&p, x + width + 30, y + 150, START, "--lr 1e-3 --min-lr 1e-4");
    text(&p, x + width + 30, y + 166, START, "--lr-warmup-iters 10");
    text(&p, x + width + 30, y + 182, START, "--train-iters 100");
    text(&p, x + width + 30, y + 198, START, "--lr-wsd-decay-iters 30");
    picture_close(&p);
}

/* ---- 6: floating-point operations of a step ---------------------------------------------------------------------- */

/* A bar of a step's floating-point operations: the forward, and twice as many in the backward. */
static void draw_flops(picture *p, double y, double scale, const char *name, double flops, double total) {
    const double x = 250;
    for (int part = 0; part < 3; part++)
        frame(p, x + scale * flops * part / 3, y, scale * flops / 3, 20,
              fills[part == 0   ? BLUE
                    : part == 1 ? GREEN
                                : TEAL]);
    text(p, x - 8, y + 14, END, "%s", name);
    text(p, x + scale * flops + 8, y + 14, START, "%.1f GFLOP, %.1f%%", flops * 1e-9, 100 * flops / total);
}

/* 6 operations per weight and token: a multiplication and an addition, in the forward and for each of two gradients. */
static double matrix_flops(const table *t, mt_role first, mt_role last, int64_t tokens, int64_t layers) {
    double elements = 0;
    for (int role = (int)first; role <= (int)last; role++) {
        const mt_param *param = table_find(t, (mt_role)role);
        if (param) elements += (double)(param->rows * param->cols);
    }
    return 6 * elements * (double)(tokens * layers);
}

static void draw_step(const char *folder) {
    mt_run_options o;
    open_shape(&o, "data/configs/gpt2-124m.json");
    table t = table_open(&o.stack);
    int64_t sequences = o.stack.micro_batch_size, tokens = sequences * o.stack.seq_length, L = o.stack.num_layers;
    const char *const names[] = {"q, k, v", "attention output", "MLP up", "MLP down", "logits", "attention itself"};
    double flops[6] = {matrix_flops(&t, MT_Q, MT_V, tokens, L), matrix_flops(&t, MT_O, MT_O, tokens, L),
                       matrix_flops(&t, MT_UP, MT_UP, tokens, L), matrix_flops(&t, MT_DOWN, MT_DOWN, tokens, L),
                       matrix_flops(&t, MT_WORD_EMBEDDING, MT_WORD_EMBEDDING, tokens, 1)};
    double products = 0, most = 0;
    for (int i = 0; i < 5; i++) products += flops[i], most = fmax(most, flops[i]);
    flops[5] = (mt_flops(&o.stack, sequences) - products) * 7 / 6; // with the scores that the backward computes again
    double total = products + flops[5];
    picture p = picture_open(folder, "06-step", "Operations of a training step", 900, 280);
    text(&p, 20, 28, START, "GPT-2 124M, %lld x %lld tokens: %.1f GFLOP per step, matrix products %.1f",
         (long long)sequences, (long long)o.stack.seq_length, total * 1e-9, products * 1e-9);
    static const char *const parts[] = {"forward", "gradient of the input", "gradient of the weights"};
    for (int i = 0; i < 3; i++) {
        box(&p, 20 + 190 * i, 44, 10, 10, fills[i == 0 ? BLUE : i == 1 ? GREEN : TEAL]);
        text(&p, 36 + 190 * i, 53, START, "%s", parts[i]);
    }
    for (int i = 0; i < 6; i++) draw_flops(&p, 80 + 30 * i, 480 / most, names[i], flops[i], total);
    picture_close(&p);
    table_close(&t);
    mt_options_free(&o);
}

/* ---- 7: pipelines ------------------------------------------------------------------------------------------------ */

static void draw_pipelines(const char *folder) {
    const mt_schedule plain = {MT_SCHEDULE_1F1B, 4, 1, 8, 0}, interleaved = {MT_SCHEDULE_INTERLEAVED, 4, 2, 8, 4},
                      zero_bubble = {MT_SCHEDULE_ZB_H1, 4, 1, 8, 0};
    static const char *const names[] = {"forward", "backward (of the input)", "weights, delayed"};
    picture p = picture_open(folder, "07-schedules", "Three pipeline schedules", 900, 470);
    const double places[] = {40, 120, 300};
    for (int i = 0; i < 3; i++) {
        box(&p, places[i], 20, 10, 10, fills[i == 0 ? BLUE : i == 1 ? GREEN : TEAL]);
        text(&p, places[i] + 16, 29, START, "%s", names[i]);
    }
    text(&p, 880, 29, END, "left: rank; paler: later layers; right: most forwards held");
    draw_timeline(&p, 40, 76, 24.5, &plain, "1F1B");
    draw_timeline(&p, 40, 216, 24.5, &interleaved, "interleaved, 2 stages per rank");
    draw_timeline(&p, 40, 356, 24.5, &zero_bubble, "ZB-H1");
    picture_close(&p);
}

/* All forwards, then all backwards of twice the length, which the program cannot run: each starts as early as it can.
 */
static mt_timeline timeline_of_all_forwards(int64_t pp, int64_t micro_batches) {
    int64_t count = 2 * pp * micro_batches, i = 0, last = pp - 1 + micro_batches; // the first backward's start
    mt_timeline t = {.schedule = {MT_SCHEDULE_1F1B, pp, 1, micro_batches, 0}, .first = mt_calloc((pp + 1) * 8)};
    t.actions = mt_calloc(count * (int64_t)sizeof *t.actions), t.live = mt_calloc(pp * 8);
    t.start = mt_calloc(count * 8), t.end = mt_calloc(count * 8);
    for (int64_t rank = 0; rank < pp; rank++, t.first[rank] = i) {
        t.live[rank] = micro_batches;
        for (int64_t m = 0; m < 2 * micro_batches; m++, i++) {
            bool forward = m < micro_batches;
            t.actions[i].kind = forward ? MT_ACTION_FORWARD : MT_ACTION_BACKWARD;
            t.actions[i].micro_batch = m % micro_batches;
            t.actions[i].peer = -1;
            t.start[i] = (double)(forward ? rank + m : last + 2 * (pp - 1 - rank + m - micro_batches));
            t.end[i] = t.start[i] + (forward ? 1 : 2);
        }
    }
    t.span = t.end[micro_batches * 2 - 1];
    t.bubble = t.span / (3 * (double)micro_batches) - 1;
    return t;
}

/* Draws a timeline, and below it the micro-batches whose activations rank 0 holds. */
static void draw_waiting(picture *p, double x, double y, double unit, const mt_timeline *t, const char *name) {
    const double base = y + 24 * (double)t->schedule.pp + 62, level = 6;
    text(p, x, y - 10, START, "%s: bubble %.1f%% of the work, rank 0 holds up to %lld micro-batches", name,
         100 * t->bubble, (long long)t->live[0]);
    mt_timeline_draw(t, p->file, x, y, unit);
    for (int time = 0; time < llround(t->span); time++) {
        int held = 0;
        for (int64_t i = t->first[0]; i < t->first[1]; i++) {
            if (t->actions[i].peer >= 0) continue;
            if (t->actions[i].kind == MT_ACTION_FORWARD) held += t->start[i] <= time;
            if (t->actions[i].kind == MT_ACTION_BACKWARD) held -= t->end[i] <= time;
        }
        if (held > 0) box(p, x + unit * time, base - level * held, unit - 1, level * held, fills[ORANGE]);
    }
    text(p, x - 8, base - 12, END, "held by");
    text(p, x - 8, base, END, "rank 0");
    line(p, x, base, x + unit * t->span, base, FAINT, 0.8);
}

static void draw_memory(const char *folder) {
    const mt_schedule plain = {MT_SCHEDULE_1F1B, 4, 1, 8, 0};
    const mt_action_costs costs = {1, 1, 1, 0};
    mt_timeline first = timeline_of_all_forwards(4, 8), alternating;
    MT_CHECK(mt_timeline_create(&alternating, &plain, &costs, 0) == 0);
    picture p =
        picture_open(folder, "07-memory", "All forwards first, and 1F1B: the same bubble, less memory", 900, 456);
    static const char *const names[] = {"forward", "backward", "activations that wait, in micro-batches"};
    for (int i = 0; i < 3; i++) {
        box(&p, 70 + 120 * i, 20, 10, 10, fills[i == 0 ? BLUE : i == 1 ? GREEN : ORANGE]);
        text(&p, 86 + 120 * i, 29, START, "%s", names[i]);
    }
    text(&p, 880, 29, END, "left: rank; right: most that it holds");
    draw_waiting(&p, 70, 72, 23, &first, "all forwards first (GPipe)");
    draw_waiting(&p, 70, 280, 23, &alternating, "1F1B");
    mt_timeline_free(&first), mt_timeline_free(&alternating);
    picture_close(&p);
}

/* The bubble fraction over the number of micro-batches, obtained by simulating the lists. */
static void draw_bubbles(const char *folder) {
    enum { PP = 8, MOST = 64 };
    static const mt_schedule kinds[] = {{MT_SCHEDULE_1F1B, PP, 1, 0, 0},
                                        {MT_SCHEDULE_INTERLEAVED, PP, 2, 0, PP},
                                        {MT_SCHEDULE_INTERLEAVED, PP, 4, 0, PP},
                                        {MT_SCHEDULE_ZB_H1, PP, 1, 0, 0}};
    static const char *const names[] = {"1F1B", "interleaved, 2 stages per rank", "interleaved, 4 stages per rank",
                                        "ZB-H1"};
    static const char *const strokes[] = {"#5b6470", "#c0561a", "#b8860b", "#2f6db0"};
    const mt_action_costs costs = {1, 1, 1, 0};
    const double x = 70, y = 40, width = 520, height = 200;
    picture p = picture_open(folder, "07-bubbles", "Bubbles of pipeline schedules", 900, 290);
    for (int i = 0; i <= 4; i++) {
        line(&p, x, y + height * (1 - i / 4.0), x + width, y + height * (1 - i / 4.0), GRID, 0.6);
        text(&p, x - 8, y + height * (1 - i / 4.0) + 4, END, "%d%%", 25 * i);
    }
    for (int m = PP; m <= MOST; m += PP) text(&p, x + width * (m - PP) / (MOST - PP), y + height + 18, MIDDLE, "%d", m);
    text(&p, x + width / 2, y + height + 36, MIDDLE, "micro-batches per step, on %d ranks", PP);
    text(&p, x - 55, y - 14, START, "bubble: idle time, in percent of the time of the work");
    for (int k = 0; k < 4; k++) {
        fprintf(p.file, "<path d=\"");
        for (int64_t m = PP; m <= MOST; m += PP) {
            mt_schedule schedule = kinds[k];
            mt_timeline t;
            schedule.micro_batches = m;
            MT_CHECK(mt_timeline_create(&t, &schedule, &costs, 0) == 0);
            fprintf(p.file, "%c%.1f %.1f", m > PP ? 'L' : 'M', x + width * (double)(m - PP) / (MOST - PP),
                    y + height * (1 - t.bubble));
            mt_timeline_free(&t);
        }
        fprintf(p.file, "\" fill=\"none\" stroke=\"%s\" stroke-width=\"2\"/>\n", strokes[k]);
        line(&p, x + width + 30, y + 14 + 24 * k, x + width + 54, y + 14 + 24 * k, strokes[k], 2);
        text(&p, x + width + 62, y + 18 + 24 * k, START, "%s", names[k]);
    }
    picture_close(&p);
}

/* ---- 9: data parallelism: memory of a rank and its communication ------------------------------------------------- */

enum { SHARING_RANKS = 4, SHARING_RANK = 1, NUM_STRATEGIES = 4 };
static const char *const strategies[NUM_STRATEGIES] = {"no_shard", "optim", "optim_grads", "optim_grads_params"};

/* A small model on one rank of four. The other ranks do not exist: collectives are recorded for the drawing, not
 * executed. */
typedef struct sharer {
    mt_run_options options;
    mt_grid grid;
    mt_model *model;
} sharer;

static void sharer_open(sharer *s, const char *strategy, bool overlaps, const mt_ops *ops) {
    const char *words[] = {"--num-layers",
                           "4",
                           "--hidden-size",
                           "64",
                           "--num-attention-heads",
                           "4",
                           "--vocab-size",
                           "512",
                           "--train-iters",
                           "1",
                           "--lr",
                           "1",
                           "--bf16",
                           "--data-parallel-sharding-strategy",
                           strategy,
                           "--overlap-grad-reduce",
                           "--overlap-param-gather"};
    mt_error error;
    *s = (sharer){.grid = mt_grid_of_one};
    s->grid.data_context.size = SHARING_RANKS, s->grid.data_context.rank = SHARING_RANK;
    parse_options(&s->options, words, (int)(sizeof words / sizeof *words) - (overlaps ? 0 : 2));
    mt_model_plan plan = {.max_tokens = 16, .max_logits = 16, .max_position = 64, .train = true};
    check(mt_model_create(&s->model, &s->options.stack, &s->grid, ops, &plan, &error), &error);
}

static void sharer_close(sharer *s) {
    mt_model_destroy(s->model);
    mt_options_free(&s->options);
}

/* Draws one array of a bucket; the part that the rank keeps permanently is filled. Returns the bytes of that part. */
static int64_t draw_array(picture *p, double x, double y, double width, const mt_bucket *b, bool whole, int64_t size,
                          const char *fill) {
    double scale = width / (double)b->count;
    frame(p, x, y, width, 16, "#eceee9");
    if (whole)
        frame(p, x, y, width, 16, fill);
    else
        frame(p, x + scale * (double)b->shard_first, y, scale * (double)b->shard_count, 16, fill);
    return (whole ? b->count : b->shard_count) * size;
}

static void draw_strategy(picture *p, double y, const char *strategy) {
    static const char *const names[] = {"params", "grads", "master", "m", "v"};
    sharer s;
    int64_t count, bytes = 0;
    sharer_open(&s, strategy, false, &mt_cpu_ops);
    const mt_bucket *b = &mt_model_buckets(s.model, &count)[1];
    for (int i = 0; i < 5; i++) {
        bool whole = i == 0 ? b->params != NULL : i == 1 ? b->grads != NULL : b->shard_count == b->count;
        double x = 190 + i * 118;
        bytes += draw_array(p, x, y, 104, b, whole, i == 0 ? 2 : 4, fills[i]);
        if (y < 90) text(p, x + 52, y - 8, MIDDLE, "%s", names[i]);
    }
    text(p, 25, y + 12, START, "%s", strategy);
    text(p, 790, y + 12, START, "%.1f bytes", (double)bytes / (double)b->count);
    sharer_close(&s);
}

/* A piece of work for a bucket on a stream. */
typedef struct stretch {
    int stream;
    double begin, end;
    int64_t bucket;
    bool backward;
    enum { PRODUCT, GATHER, SUM } kind;
} stretch;

/* A simulated backend: matrix products and collectives advance the time by their size and do nothing else. */
enum { MAX_STRETCHES = 512, COMPUTE = 0, NUM_LANES = 3 };
static struct {
    stretch stretches[MAX_STRETCHES];
    int count, streams;
    double now[NUM_LANES]; // when each stream has finished its work
    const mt_bucket *buckets;
    int64_t num_buckets;
} recorder;

static int lane_of(mt_stream *stream) {
    return (int)((double *)(void *)stream - recorder.now);
}

/* The bucket that holds the address `values`. */
static int64_t bucket_at(const void *values) {
    for (int64_t i = 0; i < recorder.num_buckets; i++) {
        const mt_bucket *b = &recorder.buckets[i];
        const char *arrays[] = {b->params, (const char *)b->grads, b->param_shard};
        int64_t bytes[] = {b->count * 2, b->count * 4, b->shard_count * 2};
        for (int k = 0; k < 3; k++)
            if (arrays[k] && (const char *)values >= arrays[k] && (const char *)values < arrays[k] + bytes[k]) return i;
    }
    mt_die("the address of a collective is in no bucket");
}

static stretch *record(mt_stream *stream, double duration, const void *values) {
    int lane = lane_of(stream);
    MT_CHECK(recorder.count < MAX_STRETCHES);
    stretch *added = &recorder.stretches[recorder.count++];
    *added = (stretch){lane, recorder.now[lane], recorder.now[lane] + duration, bucket_at(values), false, PRODUCT};
    recorder.now[lane] += duration;
    return added;
}

static mt_stream *recorded_create(void *workspace, int64_t bytes, bool deterministic) {
    (void)workspace, (void)bytes, (void)deterministic;
    MT_CHECK(recorder.streams < NUM_LANES);
    return (mt_stream *)(void *)&recorder.now[recorder.streams++];
}

static void recorded_wait_stream(mt_stream *stream, mt_stream *other) {
    double *now = &recorder.now[lane_of(stream)];
    *now = fmax(*now, recorder.now[lane_of(other)]);
}

static void recorded_product(mt_stream *stream, int64_t T, int64_t N, int64_t K, const void *weights) {
    record(stream, (double)(T * N * K) * 1e-5, weights);
}

static void recorded_forward(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    (void)dtype;
    recorded_product(stream, a->T, a->N, a->K, a->w);
}

static void recorded_backward_input(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    recorded_forward(a, dtype, stream);
    recorder.stretches[recorder.count - 1].backward = true;
}

static void recorded_backward_weight(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    (void)dtype;
    recorded_product(stream, a->T, a->N, a->K, a->dw);
    recorder.stretches[recorder.count - 1].backward = true;
}

static void recorded_gather(void *out, const void *in, int64_t count, mt_dtype dtype, const mt_group *group,
                            mt_stream *stream) {
    (void)out;
    record(stream, (double)(count * mt_dtype_size(dtype) * (group->size - 1)) * 3e-5, in)->kind = GATHER;
}

static void recorded_scatter(void *out, const void *in, int64_t count, mt_dtype dtype, const mt_group *group,
                             mt_stream *stream) {
    (void)out;
    record(stream, (double)(count * mt_dtype_size(dtype) * (group->size - 1)) * 3e-5, in)->kind = SUM;
}

static void recorded_destroy(mt_stream *stream) {
    (void)stream;
    recorder.streams--;
}

static void draw_talk_axis(picture *p, double x, double y, double scale, int end) {
    line(p, x, y, x + scale * end, y, FAINT, 0.8);
    for (int t = 0; t <= end; t += 25) {
        line(p, x + scale * t, y, x + scale * t, y + 5, FAINT, 0.8);
        text(p, x + scale * t, y + 17, MIDDLE, "%d", t);
    }
}

/* Empties the recorder; returns operations of the CPU whose products and streams it records. */
static mt_ops recorder_begin(void) {
    mt_ops ops = mt_cpu_ops;
    ops.stream_create = recorded_create, ops.stream_wait_stream = recorded_wait_stream;
    ops.stream_destroy = recorded_destroy;
    ops.linear_forward = recorded_forward, ops.linear_backward_input = recorded_backward_input;
    ops.linear_backward_weight = recorded_backward_weight;
    memset(&recorder, 0, sizeof recorder);
    return ops;
}

/* Draws a forward and a backward: a row for each kind of work, one box per piece of it, one colour per bucket. On one
 * stream they take turns. */
static void draw_talk(picture *p, double y, bool overlaps, double scale, const char *title) {
    static const char *const rows[] = {
        [PRODUCT] = "products", [SUM] = "sums of gradients", [GATHER] = "gathers of weights"};
    const double x = 160, row = 22;
    mt_ops ops = recorder_begin();
    mt_batch batch = {0};
    sharer s;
    ops.all_gather = recorded_gather, ops.reduce_scatter = recorded_scatter;
    sharer_open(&s, "optim_grads_params", overlaps, &ops);
    recorder.buckets = mt_model_buckets(s.model, &recorder.num_buckets);
    letters_batch(&batch, 16, false);
    mt_model_forward(s.model, &batch, true);
    mt_model_backward(s.model);
    double forward_end = 0, backward_begin = INFINITY, end = 0;
    for (int i = 0; i < recorder.count; i++) {
        const stretch *at = &recorder.stretches[i];
        end = fmax(end, at->end);
        if (at->kind != PRODUCT) continue;
        if (at->backward)
            backward_begin = fmin(backward_begin, at->begin);
        else
            forward_end = fmax(forward_end, at->end);
    }
    text(p, 25, y, START, "%s: %.0f", title, end);
    bracket(p, x, x + scale * forward_end, y + 26);
    text(p, x + scale * forward_end / 2, y + 16, MIDDLE, "forward");
    bracket(p, x + scale * backward_begin, x + scale * end, y + 26);
    text(p, x + scale * (backward_begin + end) / 2, y + 16, MIDDLE, "backward");
    for (int kind = 0; kind < NUM_LANES; kind++) {
        double top = y + 32 + row * kind;
        text(p, x - 10, top + 13, END, "%s", rows[kind]);
        box(p, x, top, scale * end, row - 4, "#eceee9");
    }
    for (int i = 0; i < recorder.count; i++) {
        const stretch *at = &recorder.stretches[i];
        const char *fill = at->bucket == 0 ? fills[TEAL] : fills[(at->bucket - 1) % TEAL];
        frame(p, x + scale * at->begin, y + 32 + row * at->kind, scale * (at->end - at->begin), row - 4, fill);
    }
    if (overlaps) draw_talk_axis(p, x, y + 32 + row * NUM_LANES + 4, scale, 150);
    mt_batch_free(&batch);
    sharer_close(&s);
}

/* The colours of the buckets with products: that of the word embedding, which is the output layer too, and the layers'.
 */
static void draw_bucket_legend(picture *p, double x, double y) {
    sharer s;
    int64_t count, layers = 0;
    mt_param *params;
    sharer_open(&s, "no_shard", false, &mt_cpu_ops);
    const mt_bucket *buckets = mt_model_buckets(s.model, &count);
    mt_params_build(&params, &s.options.stack, NULL);
    box(p, x, y - 9, 10, 10, fills[TEAL]);
    text(p, x + 16, y, START, "embedding, logits");
    for (int64_t i = 1; i < count; i++) {
        int64_t layer = params[buckets[i].first_param].layer;
        if (layer < 0) continue;
        double left = x + 170 + 100 * (double)layers++;
        box(p, left, y - 9, 10, 10, fills[(i - 1) % TEAL]);
        text(p, left + 16, y, START, "layer %lld", (long long)layer);
    }
    free(params);
    sharer_close(&s);
}

static void draw_sharing(const char *folder) {
    picture p = picture_open(folder, "09-shards", "Memory of data-parallel ranks", 900, 522);
    text(&p, 25, 28, START,
         "A layer's bucket on rank %d of %d: the part that is always in memory, and its bytes per parameter",
         SHARING_RANK, SHARING_RANKS);
    for (int i = 0; i < NUM_STRATEGIES; i++) draw_strategy(&p, 70 + 26 * i, strategies[i]);
    text(&p, 25, 214, START, "The time of a micro-batch with optim_grads_params, in 100,000 multiplications:");
    draw_bucket_legend(&p, 25, 238);
    draw_talk(&p, 270, false, 4.6, "all on one stream");
    draw_talk(&p, 388, true, 4.6, "with overlap");
    picture_close(&p);
}

/* ---- 8: context parallelism -------------------------------------------------------------------------------------- */

enum { RING = 4, RING_TOKENS = 32, RING_CHUNK = RING_TOKENS / (2 * RING) };

/* step[q, k]: the step of the ring in which the owner of query q meets key k, plus one; 0: never. Also counts the pairs
 * that each rank computes in each step. */
static void ring_steps(int step[RING_TOKENS][RING_TOKENS], int64_t pairs[RING][RING]) {
    const mt_span sequence = {0, RING_TOKENS, 0, RING_TOKENS, true};
    mt_batch whole, local[RING];
    mt_batch_alloc(&whole, RING_TOKENS);
    whole.num_tokens = RING_TOKENS, whole.num_spans = 1, whole.spans[0] = sequence;
    for (int32_t t = 0; t < RING_TOKENS; t++) whole.positions[t] = t;
    memset(step, 0, sizeof(int[RING_TOKENS][RING_TOKENS]));
    int64_t cuts[2 * RING + 1];
    mt_context_cut(cuts, &whole, RING, 0);
    for (int rank = 0; rank < RING; rank++) {
        int32_t rows[RING_TOKENS / RING];
        mt_batch_alloc(&local[rank], RING_TOKENS);
        mt_context_tokens(rows, cuts, RING, rank);
        mt_batch_take(&local[rank], &whole, rows, RING_TOKENS / RING);
    }
    for (int rank = 0; rank < RING; rank++)
        for (int i = 0; i < RING; i++) {
            enum { ROWS = RING_TOKENS / RING };
            int source = (rank + RING - i) % RING;
            bool seen[ROWS * ROWS] = {false};
            mt_span span;
            mt_ring_spans(&span, &whole, cuts, RING, rank, source);
            attention_sees(seen, &span, 1, ROWS, ROWS, 0);
            pairs[rank][i] = 0;
            for (int q = 0; q < ROWS; q++)
                for (int k = 0; k < ROWS; k++)
                    if (seen[q * ROWS + k]) {
                        int *at = &step[local[rank].positions[q]][local[source].positions[k]];
                        MT_CHECK(*at == 0); // each pair once
                        *at = i + 1, pairs[rank][i]++;
                    }
        }
    for (int rank = 0; rank < RING; rank++) mt_batch_free(&local[rank]);
    mt_batch_free(&whole);
}

/* The number of keys that rows [first, first + count) of a causal sequence attend to in total. */
static int64_t causal_pairs(int64_t first, int64_t count) {
    return (first + 1 + first + count) * count / 2;
}

static void draw_ring_mask(picture *p, double x, double y, double cell, int step[RING_TOKENS][RING_TOKENS]) {
    double size = cell * RING_TOKENS, chunk = cell * RING_CHUNK;
    box(p, x, y, size, size, "#ffffff");
    for (int q = 0; q < RING_TOKENS; q++)
        for (int k = 0, end; k < RING_TOKENS; k = end) {
            for (end = k + 1; end < RING_TOKENS && step[q][end] == step[q][k];) end++;
            MT_CHECK((step[q][k] > 0) == (k <= q)); // the pairs are exactly those of the causal mask
            if (step[q][k] > 0) box(p, x + cell * k, y + cell * q, cell * (end - k), cell, fills[step[q][k] - 1]);
        }
    for (int c = 0; c <= 2 * RING; c++) {
        line(p, x, y + chunk * c, x + size, y + chunk * c, GRID, 0.6);
        line(p, x + chunk * c, y, x + chunk * c, y + size, GRID, 0.6);
        int owner = c < RING ? c : 2 * RING - 1 - c;
        if (c == 2 * RING) break;
        text(p, x + chunk * (c + 0.5), y - 6, MIDDLE, "%d", owner);
        text(p, x - 8, y + chunk * (c + 0.5) + 4, END, "rank %d", owner);
    }
}

static void draw_context(const char *folder) {
    int step[RING_TOKENS][RING_TOKENS];
    int64_t pairs[RING][RING];
    ring_steps(step, pairs);
    picture p = picture_open(folder, "08-zigzag", "The zig-zag and the steps of its ring", 900, 440);
    text(&p, 20, 26, START,
         "%d tokens in %d chunks over %d ranks: the owner of each, and the step of the ring in which", RING_TOKENS,
         2 * RING, RING);
    text(&p, 20, 42, START, "a query (row) meets a key (column)");
    draw_ring_mask(&p, 80, 78, 10, step);
    const double x = 500, scale = 1.5;
    double y = 88;
    for (int i = 0; i < RING; i++) {
        box(&p, x + 90 * i, y - 9, 10, 10, fills[i]);
        text(&p, x + 90 * i + 16, y, START, "step %d", i);
    }
    text(&p, x - 55, y += 36, START, "pairs of a query and a key that each rank computes");
    for (int rank = 0; rank < RING; rank++) {
        double at = x;
        int64_t all = 0;
        y += 26;
        for (int i = 0; i < RING; at += scale * (double)pairs[rank][i], all += pairs[rank][i], i++) {
            frame(&p, at, y - 14, scale * (double)pairs[rank][i], 20, fills[i]);
            text(&p, at + scale * (double)pairs[rank][i] / 2, y, MIDDLE, "%lld", (long long)pairs[rank][i]);
        }
        text(&p, x - 8, y, END, "rank %d", rank);
        text(&p, at + 8, y, START, "%lld", (long long)all);
    }
    text(&p, x - 55, y += 46, START, "the same with %d contiguous parts", RING);
    for (int rank = 0; rank < RING; rank++) {
        int64_t all = causal_pairs(rank * RING_TOKENS / RING, RING_TOKENS / RING);
        y += 26;
        frame(&p, x, y - 14, scale * (double)all, 20, "#ffffff");
        text(&p, x - 8, y, END, "rank %d", rank);
        text(&p, x + scale * (double)all + 8, y, START, "%lld", (long long)all);
    }
    picture_close(&p);
}

/* ---- 10: the grid of ranks --------------------------------------------------------------------------------------- */

/* Draws the same 16 ranks once for every kind of group: ranks of one colour form a group. To the right: tp, then dp;
 * downwards: cp, then pp. */
static void draw_groups(picture *p, double x, double y, const mt_grid_shape *shape, mt_group_kind kind) {
    enum { RANKS = 16, NUMBER_OF_COLOURS = NUM_FILLS + 1 };
    const double cell = 36;
    mt_grid grid = mt_grid_of_one;
    int colour_of[RANKS], groups = 0, largest = 1;
    for (int rank = 0; rank < RANKS; rank++) {
        int members[RANKS], count = mt_grid_members(members, shape, kind, rank);
        if (members[0] == rank && count > 1) groups++;
        colour_of[rank] = count == 1 ? -1 : members[0] == rank ? groups - 1 : colour_of[members[0]];
        if (count > largest) largest = count;
        MT_CHECK(groups <= NUMBER_OF_COLOURS);
        int column = rank % 2 + 2 * (rank / 4 % 2), row = rank / 2 % 2 + 2 * (rank / 8);
        double left = x + cell * column + (column > 1 ? 8 : 0), top = y + cell * row + (row > 1 ? 8 : 0);
        int colour = colour_of[rank];
        frame(p, left, top, cell - 2, cell - 2, colour < 0 ? "#ffffff" : colour < NUM_FILLS ? fills[colour] : GRID);
        text(p, left + cell / 2 - 1, top + cell / 2 + 3, MIDDLE, "%d", rank);
    }
    if (groups == 0)
        text(p, x, y - 10, START, "%s: ranks alone", mt_grid_group(&grid, kind)->name);
    else
        text(p, x, y - 10, START, "%s: %d group%s of %d", mt_grid_group(&grid, kind)->name, groups,
             groups > 1 ? "s" : "", largest);
}

static void draw_grid(const char *folder) {
    static const mt_group_kind kinds[] = {MT_GROUP_TENSOR,      MT_GROUP_CONTEXT,       MT_GROUP_DATA,
                                          MT_GROUP_PIPELINE,    MT_GROUP_DATA_CONTEXT,  MT_GROUP_STAGE,
                                          MT_GROUP_KV_REPLICAS, MT_GROUP_TENSOR_CONTEXT};
    const mt_grid_shape shape = {.tensor = 2,
                                 .context = 2,
                                 .data = 2,
                                 .pipeline = 2,
                                 .expert_tensor = 1,
                                 .expert = 1,
                                 .expert_data = 8,
                                 .num_query_groups = 1};
    picture p = picture_open(folder, "10-grid", "The groups of sixteen ranks", 900, 440);
    text(&p, 40, 28, START,
         "16 ranks, tp = cp = dp = pp = 2, a model with one key and value head: ranks of one colour are a group");
    for (int i = 0; i < 8; i++) draw_groups(&p, 80 + 200 * (i % 4), 72 + 186 * (i / 4), &shape, kinds[i]);
    for (int row = 0; row < 2; row++)
        for (int i = 0; i < 4; i++) {
            double y = 72 + 186 * row + 36 * i + (i > 1 ? 8 : 0) + 21;
            text_in(&p, FAINT, 72, y, END, i % 2 ? "cp 1" : i ? "pp 1 cp 0" : "pp 0 cp 0");
        }
    text_in(&p, FAINT, 80, 424, START, "across: tp 0, tp 1 of dp 0, then of dp 1");
    picture_close(&p);
}

/* ---- 11: a layer on one rank of a tensor group ------------------------------------------------------------------- */

enum { TENSOR_RANKS = 2, TENSOR_TOKENS = 16, MAX_ACTS = 64 };

/* A collective that takes this rank's input and returns the full output, without the parts of the sum that the other
 * ranks would add. */
static const char partial[] = "row-parallel linear";

/* An operation of the layer's forward: its result on this rank, [rows, columns]. */
typedef struct act {
    const char *name;
    int64_t rows, columns;
    double sent; // elements, for a collective
} act;

/* The operations of a layer's forward, and the elements that its backward sends. */
static struct {
    act acts[MAX_ACTS];
    int count, norms, sums, norms_back;
    int64_t hidden;
    double sent_back; // elements
    int calls_back;
} acts;

/* Records from the first norm of the layer to its second addition to the residual stream. */
static void note(const char *name, int64_t rows, int64_t columns, double sent) {
    if (acts.norms == 0 || acts.sums == 2) return;
    MT_CHECK(acts.count < MAX_ACTS);
    acts.acts[acts.count++] = (act){name, rows, columns, sent};
}

static void noted_collective(const char *name, int64_t count, double sent) {
    note(name, count / acts.hidden, acts.hidden, sent);
    if (acts.norms_back < 1 || acts.norms_back > 2) return; // only between the final and input norms
    acts.sent_back += sent;
    acts.calls_back++;
}

static void noted_all_reduce(void *buffer, int64_t count, mt_reduction reduction, mt_dtype dtype, const mt_group *group,
                             mt_stream *stream) {
    (void)buffer, (void)reduction, (void)dtype, (void)stream;
    noted_collective("all_reduce", count, 2.0 * (group->size - 1) / group->size * (double)count);
}

static void noted_gather(void *out, const void *in, int64_t count, mt_dtype dtype, const mt_group *group,
                         mt_stream *stream) {
    (void)in, (void)stream;
    memset(out, 0, (size_t)(group->size * count * mt_dtype_size(dtype)));
    noted_collective("all_gather", group->size * count, (double)((group->size - 1) * count));
}

static void noted_scatter(void *out, const void *in, int64_t count, mt_dtype dtype, const mt_group *group,
                          mt_stream *stream) {
    (void)in, (void)stream;
    memset(out, 0, (size_t)(count * mt_dtype_size(dtype)));
    noted_collective("reduce_scatter", count, (double)((group->size - 1) * count));
}

static void noted_norm(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    acts.norms++;
    note("rmsnorm", a->T, a->C, 0);
    mt_cpu_ops.rmsnorm_forward(a, dtype, stream);
}

static void noted_norm_back(const mt_norm_args *a, mt_dtype dtype, mt_stream *stream) {
    acts.norms_back++;
    mt_cpu_ops.rmsnorm_backward(a, dtype, stream);
}

static void noted_linear(const mt_linear_args *a, mt_dtype dtype, mt_stream *stream) {
    note(a->N == acts.hidden ? partial : "column-parallel linear", a->T, a->N, 0);
    mt_cpu_ops.linear_forward(a, dtype, stream);
}

static void noted_attention(const mt_attention *a, mt_dtype dtype, mt_stream *stream) {
    note("attention", TENSOR_TOKENS, a->num_heads * a->value_size, 0);
    mt_cpu_ops.attention_forward(a, dtype, stream);
}

static void noted_swiglu(const mt_activation_args *a, mt_dtype dtype, mt_stream *stream) {
    note("swiglu", a->T, a->F, 0);
    mt_cpu_ops.activation_forward(a, dtype, stream);
}

static void noted_sum(const mt_dropout_add_args *a, mt_dtype dtype, mt_stream *stream) {
    note("dropout_add", a->T, a->C, 0);
    acts.sums++;
    mt_cpu_ops.dropout_add_forward(a, dtype, stream);
}

/* Runs the forward and backward of one layer on the first of two ranks. The second does not exist and is not needed. */
static void note_layer(bool sequence_parallel) {
    const char *const words[] = {"--num-layers",
                                 "1",
                                 "--hidden-size",
                                 "64",
                                 "--num-attention-heads",
                                 "8",
                                 "--group-query-attention",
                                 "--num-query-groups",
                                 "2",
                                 "--ffn-hidden-size",
                                 "96",
                                 "--vocab-size",
                                 "256",
                                 "--swiglu",
                                 "--normalization",
                                 "RMSNorm",
                                 "--position-embedding-type",
                                 "rope",
                                 "--disable-bias-linear",
                                 "--hidden-dropout",
                                 "0",
                                 "--train-iters",
                                 "1",
                                 "--lr",
                                 "1"};
    mt_ops ops = mt_cpu_ops;
    mt_run_options options;
    mt_grid grid = mt_grid_of_one;
    mt_model *model;
    mt_batch batch;
    mt_error error;
    ops.all_reduce = noted_all_reduce, ops.all_gather = noted_gather, ops.reduce_scatter = noted_scatter;
    ops.rmsnorm_forward = noted_norm, ops.rmsnorm_backward = noted_norm_back, ops.linear_forward = noted_linear;
    ops.attention_forward = noted_attention, ops.activation_forward = noted_swiglu, ops.dropout_add_forward = noted_sum;
    parse_options(&options, words, sizeof words / sizeof *words);
    grid.tensor.size = TENSOR_RANKS;
    options.stack.tensor_model_parallel_size = TENSOR_RANKS, options.stack.sequence_parallel = sequence_parallel;
    memset(&acts, 0, sizeof acts);
    acts.hidden = options.stack.hidden_size;
    mt_model_plan plan = {.max_tokens = TENSOR_TOKENS, .max_logits = TENSOR_TOKENS, .max_position = 64, .train = true};
    check(mt_model_create(&model, &options.stack, &grid, &ops, &plan, &error), &error);
    mt_model_init(model);
    letters_batch(&batch, TENSOR_TOKENS, false);
    mt_model_forward(model, &batch, true);
    mt_model_backward(model);
    mt_batch_free(&batch);
    mt_model_destroy(model);
    mt_options_free(&options);
}

/* Draws the recorded layer from top to bottom. The region between entering and leaving tensor parallelism is shaded.
 * The result of an operation is drawn as this rank's share of [T, channels]. */
static void draw_region(picture *p, double x, double y, const char *title) {
    const double step = 36, width = 420, scale = 0.5, height = 24;
    const char *fill;
    double forward = 0, whole = TENSOR_TOKENS * (double)acts.hidden;
    bool inside = false;
    text(p, x, y - 14, START, "%s", title);
    for (int i = 0; i < acts.count; i++) {
        const act *a = &acts.acts[i];
        bool is_norm = strcmp(a->name, "rmsnorm") == 0, is_sum = strcmp(a->name, "dropout_add") == 0;
        double top = y + step * i, high = height * (double)a->rows / TENSOR_TOKENS;
        bool leaves = strcmp(a->name, "all_reduce") == 0 || strcmp(a->name, "reduce_scatter") == 0;
        inside = inside || (!is_norm && !is_sum);
        if (inside) box(p, x, top, width, step, "#e9eef4");
        bool is_part = strcmp(a->name, partial) == 0, whole_channels = is_norm || is_sum || is_part || a->sent > 0;
        fill = fills[a->sent > 0 ? ORANGE : is_norm || is_sum ? GREEN : is_part ? TEAL : BLUE];
        frame(p, x + 250, top + 5, scale * (double)a->columns * (whole_channels ? 1 : TENSOR_RANKS), height, "#ffffff");
        frame(p, x + 250, top + 5, scale * (double)a->columns, high, fill);
        text(p, x + 8, top + 22, START, "%s", a->name);
        text(p, x + 242, top + 22, END, "[%lld, %lld]", (long long)a->rows, (long long)a->columns);
        if (a->sent > 0) text(p, x + width - 6, top + 22, END, "%.2g TC", a->sent / whole);
        forward += a->sent;
        if (leaves) inside = false;
    }
    double end = y + step * acts.count + 16;
    text(p, x, end, START, "sent: forward %.2g TC; backward %.2g TC in %d calls", forward / whole,
         acts.sent_back / whole, acts.calls_back);
}

static void draw_tensor(const char *folder) {
    picture p = picture_open(folder, "11-layer", "A layer on one rank of a tensor group", 900, 640);
    text(&p, 20, 28, START,
         "A layer on one of %d ranks, T = %d, C = 64, F = 96, 8 heads, 2 groups of 8 channels: results, and "
         "elements sent",
         TENSOR_RANKS, TENSOR_TOKENS);
    static const char *const meaning[] = {"some channels", "a part of a sum", "collective", "outside of the regions"};
    static const int colours[] = {BLUE, TEAL, ORANGE, GREEN};
    for (int i = 0; i < 4; i++) {
        box(&p, 20 + 160 * i, 42, 10, 10, fills[colours[i]]);
        text(&p, 36 + 160 * i, 51, START, "%s", meaning[i]);
    }
    box(&p, 700, 42, 10, 10, "#e9eef4");
    text(&p, 716, 51, START, "in a region");
    note_layer(false);
    draw_region(&p, 20, 96, "tensor parallelism");
    note_layer(true);
    draw_region(&p, 460, 96, "with sequence parallelism");
    picture_close(&p);
}

/* ---- a matrix cut by columns and by rows ---- */

enum { CUT_T = 2, CUT_K = 4, CUT_N = 4, CUT_RANKS = 2 };

/* A matrix of small numbers; a cell has the colour of the rank that has it, or none if all ranks have it. */
static void draw_matrix(picture *p, double x, double y, const int *values, int rows, int columns, const int *by_column,
                        const int *by_row) {
    const double width = 28, height = 22;
    for (int i = 0; i < rows * columns; i++) {
        int owner = by_column ? by_column[i % columns] : by_row ? by_row[i / columns] : -1;
        double left = x + width * (i % columns), top = y + height * (i / columns);
        frame(p, left, top, width, height, owner < 0 ? "#ffffff" : fills[owner]);
        text(p, left + width / 2, top + 15, MIDDLE, "%d", values[i]);
    }
}

/* y[T, N] = x[T, K] w[N, K]ᵀ over the terms [first, end) of the sums; `w` is transposed, [K, N]. */
static void multiply(int *y, const int *x, const int *w, int first, int end) {
    for (int i = 0; i < CUT_T * CUT_N; i++) {
        y[i] = 0;
        for (int k = first; k < end; k++) y[i] += x[i / CUT_N * CUT_K + k] * w[k * CUT_N + i % CUT_N];
    }
}

static void draw_cut(const char *folder) {
    static const int x[CUT_T * CUT_K] = {1, 2, 0, 1, 2, 1, 1, 3};
    static const int w[CUT_K * CUT_N] = {1, 0, 2, 1, 0, 1, 1, 2, 3, 1, 0, 1, 1, 2, 1, 0};
    static const int halves[CUT_K] = {BLUE, BLUE, ORANGE, ORANGE}, blue[CUT_N] = {BLUE, BLUE, BLUE, BLUE},
                     orange[CUT_N] = {ORANGE, ORANGE, ORANGE, ORANGE};
    int whole[CUT_T * CUT_N], part[CUT_RANKS][CUT_T * CUT_N];
    multiply(whole, x, w, 0, CUT_K);
    for (int rank = 0; rank < CUT_RANKS; rank++)
        multiply(part[rank], x, w, CUT_K / CUT_RANKS * rank, CUT_K / CUT_RANKS * (rank + 1));
    for (int i = 0; i < CUT_T * CUT_N; i++) MT_CHECK(whole[i] == part[0][i] + part[1][i]);
    picture p = picture_open(folder, "11-cut", "A matrix cut by columns and by rows", 900, 356);
    static const char *const names[] = {"rank 0", "rank 1", "both ranks"};
    for (int i = 0; i < 3; i++) {
        frame(&p, 600 + 90 * i, 18, 10, 10, i == 0 ? fills[BLUE] : i == 1 ? fills[ORANGE] : "#ffffff");
        text(&p, 616 + 90 * i, 27, START, "%s", names[i]);
    }
    text(&p, 20, 27, START, "y[T, N] = x[T, K] w[N, K]ᵀ, T = 2, K = N = 4; w is drawn transposed, K down, N across");
    const double step = 168, left = 60;
    const char *const signs[2][4] = {{"x", "=", "", ""}, {"x", "=", "+", "="}};
    for (int cut = 0; cut < 2; cut++) {
        double y = 92 + 152 * cut, middle = y + 44;
        text(&p, 20, y - 30, START, "%s",
             cut == 0 ? "column parallel, w[N/tp, K]: each rank computes some channels of y. No message."
                      : "row parallel, w[N, K/tp]: each rank computes a part of every sum. One all-reduce.");
        text(&p, left, y - 8, START, "%s", cut == 0 ? "x[T, K]" : "x[T, K/tp]");
        draw_matrix(&p, left, y + 22, x, CUT_T, CUT_K, cut == 0 ? NULL : halves, NULL);
        text(&p, left + step, y - 8, START, "%s", cut == 0 ? "w[N/tp, K]" : "w[N, K/tp]");
        draw_matrix(&p, left + step, y, w, CUT_K, CUT_N, cut == 0 ? halves : NULL, cut == 0 ? NULL : halves);
        text(&p, left + 2 * step, y - 8, START, "%s", cut == 0 ? "y[T, N/tp]" : "y[T, N]+tp, two summands");
        if (cut == 0)
            draw_matrix(&p, left + 2 * step, y + 22, whole, CUT_T, CUT_N, halves, NULL);
        else {
            draw_matrix(&p, left + 2 * step, y + 22, part[0], CUT_T, CUT_N, blue, NULL);
            draw_matrix(&p, left + 3 * step, y + 22, part[1], CUT_T, CUT_N, orange, NULL);
            text(&p, left + 4 * step, y - 8, START, "y[T, N]");
            draw_matrix(&p, left + 4 * step, y + 22, whole, CUT_T, CUT_N, NULL, NULL);
        }
        for (int i = 0; i < 4; i++) text(&p, left + step * (i + 1) - 28, middle + 4, MIDDLE, "%s", signs[cut][i]);
    }
    picture_close(&p);
}

/* ---- 12: latent attention ---------------------------------------------------------------------------------------- */

/* A vector of so many channels, to scale, with its name above it. Returns the y below it. */
static double draw_channels(picture *p, double x, double y, int64_t channels, const char *fill, const char *name) {
    char count[32];
    double height = fmax((double)channels / 256, 1.5);
    if (name) text(p, x, y - 6, START, "%s: %s", name, grouped(channels, count));
    frame(p, x, y, 60, height, fill);
    return y + height;
}

/* A product from the right of one vector to the left of another. */
static void draw_projection(picture *p, double x, double y, double to_x, double to_y, const char *name) {
    line(p, x, y, to_x, to_y, FAINT, 1);
    if (name) label(p, x + (to_x - x) * 0.62, y + (to_y - y) * 0.62 + 4, MIDDLE, name);
}

/* The bytes of a token that a layer keeps until the end of the text. */
static void draw_cached(picture *p, double y, const char *name, int64_t elements, const char *fill) {
    char count[32];
    double width = 230 * (double)elements / 40960;
    text(p, 630, y, START, "%s: %s", name, grouped(elements, count));
    frame(p, 630, y + 6, fmax(width, 1.5), 20, fill);
}

static void draw_latent(const char *folder) {
    mt_run_options o;
    char count[32];
    open_shape(&o, "data/configs/deepseek-v3.json");
    int64_t H = o.stack.num_attention_heads, N = o.stack.qk_head_dim, R = o.stack.qk_pos_emb_head_dim,
            V = o.stack.v_head_dim;
    picture p = picture_open(folder, "12-latents", "Latent attention: channels of a token, and its cache", 900, 390);
    text(&p, 20, 26, START, "A token in a layer of DeepSeek-V3; heights are channels, to scale");
    draw_channels(&p, 20, 150, o.stack.hidden_size, fills[TEAL], "x");
    draw_channels(&p, 200, 100, o.stack.q_lora_rank, fills[YELLOW], "latent of q");
    draw_channels(&p, 200, 250, o.stack.kv_lora_rank, fills[GREEN], "latent of k, v");
    draw_channels(&p, 200, 340, R, fills[ORANGE], NULL);
    text(&p, 200, 358, START, "k, RoPE, of all heads: %s", grouped(R, count));
    double y = draw_channels(&p, 440, 72, H * N, fills[BLUE], "q, no RoPE");
    text(&p, 440, y + 16, START, "q, RoPE: %s", grouped(H * R, count));
    y = draw_channels(&p, 440, y + 22, H * R, fills[ORANGE], NULL);
    y = draw_channels(&p, 440, y + 28, H * N, fills[BLUE], "k, no RoPE");
    y = draw_channels(&p, 440, y + 28, H * V, fills[GREEN], "v");
    draw_projection(&p, 80, 158, 200, 103, "q_a_proj");
    draw_projection(&p, 80, 164, 200, 251, "kv_a_proj");
    draw_projection(&p, 80, 170, 200, 341, NULL);
    draw_projection(&p, 260, 102, 440, 104, "q_b_proj");
    draw_projection(&p, 260, 105, 440, 173, NULL);
    draw_projection(&p, 260, 250, 440, 247, "kv_b_proj");
    draw_projection(&p, 260, 252, 440, 339, NULL);
    text(&p, 630, 72, START, "Cached elements of a token and layer:");
    draw_cached(&p, 100, "the heads", H * (N + R + V), fills[BLUE]);
    draw_cached(&p, 160, "8 groups of 128 channels", (int64_t)2 * 8 * 128, fills[YELLOW]);
    draw_cached(&p, 220, "the latent and the RoPE key", o.stack.kv_lora_rank + R, fills[GREEN]);
    picture_close(&p);
    mt_options_free(&o);
}

/* ---- 13: checkpoints --------------------------------------------------------------------------------------------- */

enum { SAVERS = 2 }; // tensor-parallel ranks, and as many data-parallel ones of each

/* The elements of a parameter that each of four ranks writes. */
static void draw_shares(picture *p, double x, double y, double scale, mt_role role, const mt_options *options) {
    const mt_stage stage = {.num_layers = options->num_layers, .embedding = true, .loss = true};
    table t = table_open(options);
    const mt_param *whole = table_find(&t, role);
    MT_CHECK(whole);
    char name[160];
    text(p, x, y - 8, START, "%s", short_name(whole, name, sizeof name));
    frame(p, x, y, fmax(scale * (double)whole->cols, 4), scale * (double)whole->rows, "#ffffff");
    for (int tp = 0; tp < SAVERS; tp++) {
        mt_partition partition = {.stages = &stage, .num_stages = 1, .tp = SAVERS, .tp_rank = tp, .ep = 1, .etp = 1};
        table part = {0};
        part.count = mt_params_build(&part.rows, options, &partition);
        const mt_param *row = table_find(&part, role);
        for (int dp = 0; dp < SAVERS && row->counted; dp++) {
            int64_t begin = row->rows * dp / SAVERS, end = row->rows * (dp + 1) / SAVERS;
            frame(p, x + scale * (double)row->first_col, y + scale * (double)(row->first_row + begin),
                  fmax(scale * (double)row->cols, 4), scale * (double)(end - begin), fills[2 * dp + tp]);
        }
        free(part.rows);
    }
    table_close(&t);
}

/* A step of a save, and a line to the next one. */
static void draw_save_step(picture *p, double x, const char *words, bool last) {
    frame(p, x, 300, 150, 26, fills[last ? GREEN : TEAL]);
    text(p, x + 75, 317, MIDDLE, "%s", words);
    if (!last) line(p, x + 152, 313, x + 166, 313, INK, 1.2);
}

static void draw_checkpoint(const char *folder) {
    static const char *const words[] = {"--num-layers",
                                        "1",
                                        "--hidden-size",
                                        "64",
                                        "--num-attention-heads",
                                        "4",
                                        "--ffn-hidden-size",
                                        "160",
                                        "--swiglu",
                                        "--normalization",
                                        "RMSNorm",
                                        "--position-embedding-type",
                                        "rope",
                                        "--disable-bias-linear",
                                        "--vocab-size",
                                        "256",
                                        "--train-iters",
                                        "1",
                                        "--lr",
                                        "1"};
    static const mt_role roles[] = {MT_WORD_EMBEDDING, MT_Q, MT_O, MT_GATE, MT_DOWN, MT_INPUT_NORM};
    static const double places[] = {20, 130, 240, 350, 460, 680};
    static const char *const steps[] = {"write all files", "flush them", "rename the folder", "flush its name",
                                        "rename latest"};
    mt_run_options o;
    picture p = picture_open(folder, "13-shares", "The parts of a checkpoint that each rank writes", 900, 370);
    text(&p, 20, 26, START, "The tensors of model.safetensors, and who writes them: TP 2 x DP 2, every rank at once");
    for (int rank = 0; rank < SAVERS * SAVERS; rank++) {
        box(&p, 600 + 75 * rank, 17, 10, 10, fills[rank]);
        text(&p, 616 + 75 * rank, 26, START, "rank %d", rank);
    }
    parse_options(&o, words, sizeof words / sizeof *words);
    for (int i = 0; i < 6; i++) draw_shares(&p, places[i], 66, 1.2 * (i == 0 ? 0.6 : 1), roles[i], &o.stack);
    for (int i = 0; i < 5; i++) draw_save_step(&p, 20 + 168 * i, steps[i], i == 4);
    text(&p, 20, 290, START, "A save. If the machine dies before the last step, the checkpoint before counts:");
    bracket(&p, 20, 842, 348);
    text(&p, 431, 362, MIDDLE, "at every moment, latest names a whole checkpoint");
    picture_close(&p);
    mt_options_free(&o);
}

/* ---- 14: routing ------------------------------------------------------------------------------------------------- */

enum { ROUTED = 32, EXPERTS = 8, CHOICES = 2, BIAS_STEPS = 200 };

/* Logits that are higher for the first two experts, for every token. */
static void routed_logits(float logits[ROUTED * EXPERTS]) {
    for (int i = 0; i < ROUTED * EXPERTS; i++) {
        uint32_t words[4];
        mt_philox(words, 15, (uint64_t)i, 0);
        logits[i] = (float)(words[0] >> 8) / (1 << 22) + (i % EXPERTS < 2 ? 1.5f : 0);
    }
}

/* Draws one token per row and one expert per column. Dropped choices are outlined. The loads of the kept choices are
 * below. */
static void draw_routing(picture *p, double x, const char *title, const int32_t *experts, const int32_t *kept) {
    const double y = 76, cell = 9, width = 22;
    float loads[EXPERTS] = {0};
    text(p, x, y - 10, START, "%s", title);
    box(p, x, y, width * EXPERTS, cell * ROUTED, "#eef0ec");
    for (int i = 0; i < ROUTED * CHOICES; i++)
        frame(p, x + width * experts[i] + 1, y + cell * (double)(i / CHOICES) + 1, width - 2, cell - 2,
              kept[i] < 0 ? "#ffffff" : fills[experts[i] % NUM_FILLS]);
    mt_cpu_ops.count_experts(loads, kept, ROUTED * CHOICES, EXPERTS, NULL);
    for (int e = 0; e < EXPERTS; e++) {
        double high = 2.5 * (double)loads[e], middle = x + width * (e + 0.5);
        frame(p, x + width * e + 1, y + cell * ROUTED + 90 - high, width - 2, high, fills[e % NUM_FILLS]);
        text(p, middle, y + cell * ROUTED + 14, MIDDLE, "%d", e);
        text(p, middle, y + cell * ROUTED + 104, MIDDLE, "%d", (int)loads[e]);
    }
}

static void draw_routers(const char *folder) {
    static float logits[ROUTED * EXPERTS], probs[ROUTED * CHOICES], bias[EXPERTS];
    static int32_t experts[ROUTED * CHOICES], kept[ROUTED * CHOICES];
    int64_t index[ROUTED];
    int32_t invalid = 0;
    const float scale = 1;
    const mt_ops *ops = &mt_cpu_ops;
    mt_router router = {.num_experts = EXPERTS, .topk = CHOICES, .score = MT_SCORE_SIGMOID, .scaling = 1};
    mt_router together = {.num_experts = EXPERTS, .topk = CHOICES, .pre_softmax = true, .scaling = 1};
    picture p = picture_open(folder, "14-routing", "Four ways to choose experts", 900, 490);
    text(&p, 20, 28, START,
         "%d tokens, one a row, choose %d of %d experts, one a column, by the same logits; below, loads", ROUTED,
         CHOICES, EXPERTS);
    routed_logits(logits);
    for (int t = 0; t < ROUTED; t++) index[t] = t;
    ops->route_forward(
        &(mt_route_args){ROUTED, &router, logits, .probs = probs, .experts = experts, .invalid = &invalid}, NULL);
    draw_routing(&p, 20, "the greatest scores", experts, experts);
    mt_drop_args drop = {.T = ROUTED, .k = CHOICES, .count = ROUTED, .capacity = ROUTED * CHOICES / EXPERTS};
    drop.experts = experts, drop.probs = probs, drop.token_index = index, drop.kept = kept;
    ops->drop_tokens(&drop, NULL);
    draw_routing(&p, 243, "and a capacity of 8", experts, kept);
    for (int step = 0; step < BIAS_STEPS; step++) {
        float loads[EXPERTS] = {0};
        ops->route_forward(&(mt_route_args){ROUTED, &router, logits, .bias = bias, .probs = probs, .experts = experts,
                                            .invalid = &invalid},
                           NULL);
        ops->count_experts(loads, experts, ROUTED * CHOICES, EXPERTS, NULL);
        ops->expert_bias_step(bias, loads, &scale, EXPERTS, 0.002f, NULL);
    }
    draw_routing(&p, 466, "a bias after 200 steps", experts, experts);
    ops->route_sinkhorn(&(mt_route_args){ROUTED, &together, logits, .count = ROUTED, .probs = probs, .experts = experts,
                                         .invalid = &invalid},
                        NULL);
    draw_routing(&p, 689, "Sinkhorn", experts, experts);
    picture_close(&p);
}

/* ---- 15: two grids over the same ranks --------------------------------------------------------------------------- */

static void draw_folding(const char *folder) {
    static const mt_group_kind kinds[] = {MT_GROUP_TENSOR,      MT_GROUP_CONTEXT, MT_GROUP_DATA_CONTEXT,
                                          MT_GROUP_PIPELINE,    MT_GROUP_EXPERT,  MT_GROUP_EXPERT_TENSOR,
                                          MT_GROUP_EXPERT_DATA, MT_GROUP_PIPELINE};
    const mt_grid_shape shape = {.tensor = 2,
                                 .context = 2,
                                 .data = 2,
                                 .pipeline = 2,
                                 .expert_tensor = 1,
                                 .expert = 4,
                                 .expert_data = 2,
                                 .num_query_groups = 8};
    picture p = picture_open(folder, "15-folding", "Two grids over the same sixteen ranks", 900, 440);
    text(&p, 20, 28, START,
         "The same 16 ranks, for dense layers (tp = cp = dp = pp = 2) and for experts (etp = 1, ep = 4, edp = 2, "
         "pp = 2)");
    for (int i = 0; i < 8; i++) draw_groups(&p, 80 + 200 * (i % 4), 72 + 186 * (i / 4), &shape, kinds[i]);
    text_in(&p, FAINT, 72, 72 + 80, END, "dense");
    text_in(&p, FAINT, 72, 72 + 186 + 80, END, "experts");
    text(&p, 80, 424, START, "Ranks of one colour are a group; white: groups of one.");
    picture_close(&p);
}

/* ---- the journey of a token ---- */

enum { JOURNEY_RANKS = 2, JOURNEY_TOKENS = 6, JOURNEY_EXPERTS = 4, JOURNEY_CHOICES = 2, JOURNEY_ROWS = 12 };

/* A row: a token's hidden state on its way to one of its experts, and the rank and place where it is. */
typedef struct journey_row {
    int token, expert, rank, place;
} journey_row;

/* Sorts the rows stably by a key and numbers the places on each rank. */
static void journey_sort(journey_row *rows, bool by_expert) {
    for (int i = 1; i < JOURNEY_ROWS; i++)
        for (int j = i; j > 0; j--) {
            const journey_row *a = &rows[j - 1], *b = &rows[j];
            if (a->rank < b->rank || (a->rank == b->rank && (!by_expert || a->expert <= b->expert))) break;
            journey_row swapped = rows[j];
            rows[j] = rows[j - 1], rows[j - 1] = swapped;
        }
    for (int i = 0; i < JOURNEY_ROWS; i++)
        rows[i].place = i > 0 && rows[i].rank == rows[i - 1].rank ? rows[i - 1].place + 1 : 0;
}

static double journey_top(int rank, int place) {
    return 84 + 200 * rank + 22 * place;
}

static const journey_row *journey_find(const journey_row *rows, const journey_row *row) {
    for (int i = 0; i < JOURNEY_ROWS; i++)
        if (rows[i].token == row->token && rows[i].expert == row->expert) return &rows[i];
    mt_die("the row of token %d and expert %d is lost", row->token, row->expert);
}

static void draw_journey(const char *folder) {
    enum { COLUMNS = 4, FOLLOWED = 1 };
    static const int choices[JOURNEY_TOKENS][JOURNEY_CHOICES] = {{0, 1}, {1, 2}, {0, 3}, {1, 2}, {0, 1}, {1, 3}};
    static const char *const titles[] = {"tokens",          "rows, by expert", "after the all-to-all",
                                         "by expert: MLPs", "back, as before", "their sums"};
    static const int colour[JOURNEY_EXPERTS] = {BLUE, TEAL, ORANGE, YELLOW};
    const double width = 66, step = 152, left = 62;
    journey_row at[COLUMNS][JOURNEY_ROWS]; // sorted, arrived, sorted again, back
    for (int i = 0; i < JOURNEY_ROWS; i++) {
        int token = i / JOURNEY_CHOICES;
        at[0][i] =
            (journey_row){token, choices[token][i % JOURNEY_CHOICES], token / (JOURNEY_TOKENS / JOURNEY_RANKS), 0};
    }
    journey_sort(at[0], true);
    memcpy(at[1], at[0], sizeof at[0]);
    for (int i = 0; i < JOURNEY_ROWS; i++) at[1][i].rank = at[1][i].expert / (JOURNEY_EXPERTS / JOURNEY_RANKS);
    journey_sort(at[1], false); // stable: by sender, and by expert within the rows of a sender
    memcpy(at[2], at[1], sizeof at[1]);
    journey_sort(at[2], true);
    memcpy(at[3], at[0], sizeof at[0]);
    picture p = picture_open(folder, "15-journey", "The journey of a token to its experts and back", 900, 458);
    text(&p, 20, 28, START,
         "2 ranks with 3 tokens and 2 experts each; a token has 2 experts. The thick lines follow token %d.", FOLLOWED);
    for (int i = 0; i < COLUMNS + 2; i++) text(&p, left + step * i + width / 2, 60, MIDDLE, "%s", titles[i]);
    for (int pass = 0; pass < 2; pass++) // the token that is followed lies above
        for (int column = -1; column < COLUMNS; column++)
            for (int i = 0; i < JOURNEY_ROWS; i++) {
                const journey_row *from = &at[column < 0 ? 0 : column][i];
                const journey_row *to = column < 0 || column == COLUMNS - 1 ? from : journey_find(at[column + 1], from);
                int token = from->token % (JOURNEY_TOKENS / JOURNEY_RANKS);
                double y1 = column < 0 ? journey_top(from->rank, 2 * token) : journey_top(from->rank, from->place);
                double y2 = column == COLUMNS - 1 ? journey_top(to->rank, 2 * token) : journey_top(to->rank, to->place);
                if ((from->token == FOLLOWED) != (pass == 1)) continue;
                line(&p, left + step * (column + 1) + width, y1 + 9, left + step * (column + 2), y2 + 9,
                     pass                     ? INK
                     : from->rank != to->rank ? "#b8621b"
                                              : FAINT,
                     pass ? 2.4 : 0.8);
            }
    for (int token = 0; token < JOURNEY_TOKENS; token++)
        for (int side = 0; side < 2; side++) {
            int rank = token / (JOURNEY_TOKENS / JOURNEY_RANKS), place = 2 * (token % (JOURNEY_TOKENS / JOURNEY_RANKS));
            double x = left + step * (COLUMNS + 1) * side;
            frame(&p, x, journey_top(rank, place), width, 18, "#ffffff");
            text(&p, x + width / 2, journey_top(rank, place) + 13, MIDDLE, "%s %d", side ? "sum" : "token", token);
        }
    for (int column = 0; column < COLUMNS; column++)
        for (int i = 0; i < JOURNEY_ROWS; i++) {
            const journey_row *row = &at[column][i];
            double x = left + step * (column + 1), y = journey_top(row->rank, row->place);
            frame(&p, x, y, width, 18, fills[colour[row->expert]]);
            text(&p, x + width / 2, y + 13, MIDDLE, "%d to e%d", row->token, row->expert);
        }
    for (int rank = 0; rank < JOURNEY_RANKS; rank++)
        text(&p, left - 8, journey_top(rank, 0) + 13, END, "rank %d", rank);
    line(&p, 20, 270, 880, 270, FAINT, 0.8);
    text(&p, 20, 440, START,
         "experts 0 and 1 are on rank 0, 2 and 3 on rank 1. Brown: rows that change the rank. Rank 0 gets eight rows, "
         "rank 1 four.");
    picture_close(&p);
}

/* ---- 16: recomputation ------------------------------------------------------------------------------------------- */

enum { UNIT_LAYERS = 8, DEEP_LAYERS = 64, DEEP_TOKENS = 512, MAX_WORDS = 40 };

/* A Llama of small layers with options of recomputation. */
static void recomputer_open(sharer *s, int layers, int64_t tokens, const char *recomputation, const mt_ops *ops) {
    char line[600];
    const char *words[MAX_WORDS];
    int count = 0;
    mt_error error;
    snprintf(line, sizeof line,
             "--num-layers %d --hidden-size 64 --ffn-hidden-size 192 --num-attention-heads 2 --swiglu "
             "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --vocab-size 256 --bf16 "
             "--hidden-dropout 0 --train-iters 1 --lr 1 %s",
             layers, recomputation);
    for (char *word = strtok(line, " "); word && count < MAX_WORDS; word = strtok(NULL, " ")) words[count++] = word;
    *s = (sharer){.grid = mt_grid_of_one};
    parse_options(&s->options, words, count);
    mt_model_plan plan = {.max_tokens = tokens, .max_logits = tokens, .max_position = 64, .train = true};
    check(mt_model_create(&s->model, &s->options.stack, &s->grid, ops, &plan, &error), &error);
}

/* Records the matrix products of a forward and a backward of one micro-batch. */
static void record_products(const char *recomputation) {
    mt_ops ops = recorder_begin();
    mt_batch batch = {0};
    sharer s;
    recomputer_open(&s, UNIT_LAYERS, 16, recomputation, &ops);
    recorder.buckets = mt_model_buckets(s.model, &recorder.num_buckets);
    letters_batch(&batch, 16, false);
    mt_model_forward(s.model, &batch, true);
    mt_model_backward(s.model);
    mt_batch_free(&batch);
    sharer_close(&s);
}

/* Draws the recorded products, a row for each layer; the grey band is the time from the last forward of a layer to the
 * end of its backward, during which all its values are in memory. */
static void draw_replays(picture *p, double x, double y, const char *title, const char *recomputation) {
    const double step = 12, height = 10, scale = 1.4;
    double computed[UNIT_LAYERS] = {0}, done[UNIT_LAYERS] = {0};
    bool in_backward = false;
    record_products(recomputation);
    text(p, x + 52, y - 8, START, "%s", title);
    for (int i = 0; i < recorder.count; i++) {
        const stretch *at = &recorder.stretches[i], *before = i > 0 ? at - 1 : NULL;
        if (at->bucket == 0) continue; // the output layer
        if (at->backward)
            done[at->bucket - 1] = at->end;
        else if (!before || before->bucket != at->bucket)
            computed[at->bucket - 1] = at->begin;
    }
    for (int layer = 0; layer < UNIT_LAYERS; layer++) {
        text(p, x + 44, y + step * layer + height - 1, END, "layer %d", layer + 1);
        box(p, x + 52 + scale * computed[layer], y + step * layer, scale * (done[layer] - computed[layer]), height,
            GRID);
    }
    for (int i = 0; i < recorder.count; i++) {
        const stretch *at = &recorder.stretches[i];
        const char *fill = fills[at->backward ? GREEN : in_backward ? ORANGE : BLUE];
        in_backward = in_backward || at->backward;
        if (at->bucket > 0)
            box(p, x + 52 + scale * at->begin, y + step * (double)(at->bucket - 1), scale * (at->end - at->begin),
                height, fill);
    }
}

/* The activations of a plan, in MiB. */
static double planned_activations(const char *recomputation) {
    char *plan;
    size_t bytes;
    double mebibytes = 0;
    sharer s;
    recomputer_open(&s, DEEP_LAYERS, DEEP_TOKENS, recomputation, &mt_cpu_ops);
    FILE *file = open_memstream(&plan, &bytes);
    mt_report_plan(s.model, file);
    fclose(file);
    const char *row = strstr(plan, "activations");
    MT_CHECK(row && sscanf(row, "activations %lf", &mebibytes) == 1);
    free(plan);
    sharer_close(&s);
    return mebibytes;
}

static void draw_recomputation(const char *folder) {
    static const char full[] = "--recompute-granularity full --recompute-num-layers ";
    static const char *const names[] = {"forward", "replay", "backward", "all values of the layer in memory"};
    const char *const colours[] = {fills[BLUE], fills[ORANGE], fills[GREEN], GRID};
    char words[100];
    picture p = picture_open(folder, "16-units", "Units of recomputation", 900, 560);
    text(&p, 20, 28, START,
         "The matrix products of %d layers, forward and backward of one micro-batch; time to the right", UNIT_LAYERS);
    for (int i = 0; i < 4; i++) {
        box(&p, 20 + 110 * i, 42, 10, 10, colours[i]);
        text(&p, 36 + 110 * i, 51, START, "%s", names[i]);
    }
    draw_replays(&p, 20, 92, "none", "");
    snprintf(words, sizeof words, "%s1", full);
    draw_replays(&p, 460, 92, "full, units of 1 layer", words);
    snprintf(words, sizeof words, "%s4", full);
    draw_replays(&p, 20, 226, "full, units of 4 layers", words);
    snprintf(words, sizeof words, "%s3 --recompute-method block", full);
    draw_replays(&p, 460, 226, "full, block: the first 3 layers", words);
    text(&p, 20, 362, START, "Activations of such a model with %d layers and %d tokens", DEEP_LAYERS, DEEP_TOKENS);
    for (int unit = 0, row = 0; unit <= DEEP_LAYERS; unit = unit ? 2 * unit : 1, row++) {
        snprintf(words, sizeof words, "%s%d", full, unit);
        double mebibytes = planned_activations(unit ? words : ""), y = 374 + 21 * row;
        frame(&p, 132, y, 9.2 * mebibytes, 15, fills[unit ? ORANGE : BLUE]);
        text(&p, 124, y + 12, END, unit ? "units of %d" : "none", unit);
        text(&p, 132 + 9.2 * mebibytes + 8, y + 12, START, "%.1f MiB", mebibytes);
    }
    picture_close(&p);
}

/* ---- 17: offloading ---------------------------------------------------------------------------------------------- */

enum { OFFLOADED_LAYERS = 4, MAX_COPIES = 2 * OFFLOADED_LAYERS };

/* The copies on their own stream, in order: to the host, then back. */
static struct {
    double begin[MAX_COPIES], end[MAX_COPIES];
    int count, to_host;
} copies;

static void recorded_copy(void *to, const void *from, int64_t bytes, mt_stream *stream) {
    int lane = lane_of(stream);
    memcpy(to, from, (size_t)bytes); // the batch has positions, which are indices
    if (lane == COMPUTE) return;
    MT_CHECK(copies.count < MAX_COPIES);
    copies.begin[copies.count] = recorder.now[lane];
    copies.end[copies.count++] = recorder.now[lane] += (double)bytes * 1.2e-3;
    if (recorder.stretches[recorder.count - 1].backward) return;
    copies.to_host = copies.count;
}

/* A forward and a backward of one micro-batch. */
static void record_offloading(void) {
    mt_ops ops = recorder_begin();
    mt_batch batch = {0};
    sharer s;
    memset(&copies, 0, sizeof copies);
    ops.memory_copy = recorded_copy;
    recomputer_open(&s, OFFLOADED_LAYERS, 16,
                    "--fine-grained-activation-offloading --offload-modules attn_norm mlp_norm", &ops);
    recorder.buckets = mt_model_buckets(s.model, &recorder.num_buckets);
    letters_batch(&batch, 16, false);
    mt_model_forward(s.model, &batch, true);
    mt_model_backward(s.model);
    mt_batch_free(&batch);
    sharer_close(&s);
}

/* The time of a layer's first and last product in a direction; layers count from 1, 0 is the output layer. */
static stretch layer_time(int64_t layer, bool backward) {
    stretch time = {.begin = -1};
    for (int i = 0; i < recorder.count; i++) {
        const stretch *at = &recorder.stretches[i];
        if (at->bucket != layer || at->backward != backward) continue;
        if (time.begin < 0) time.begin = at->begin;
        time.end = at->end;
    }
    return time;
}

static void draw_named(picture *p, double y, const stretch *time, const char *fill, const char *format, int64_t layer) {
    const double left = 120, scale = 6.3;
    char name[16];
    snprintf(name, sizeof name, format, (int)layer);
    frame(p, left + scale * time->begin, y, scale * (time->end - time->begin), 22, fill);
    text(p, left + scale * (time->begin + time->end) / 2, y + 15, MIDDLE, "%s", name);
}

/* A buffer holds a layer from its forward to the end of its copy, and again from the copy back to its backward. */
static void draw_buffers(picture *p, double y) {
    for (int64_t layer = 1; layer <= OFFLOADED_LAYERS; layer++) {
        stretch forward = layer_time(layer, false), backward = layer_time(layer, true);
        double top = y + 30 * (double)((layer - 1) % 2);
        int back = copies.count - (int)layer;
        stretch first = {.begin = forward.begin, .end = backward.end}, second = backward;
        if (layer <= copies.to_host) {
            first.end = copies.end[layer - 1];
            second.begin = copies.begin[back];
            draw_named(p, top, &second, fills[layer - 1], "%d", layer);
        }
        draw_named(p, top, &first, fills[layer - 1], "%d", layer);
    }
}

static void draw_offloading(const char *folder) {
    static const char *const rows[] = {"computation", "copies", "buffer 0", "buffer 1"};
    picture p = picture_open(folder, "17-buffers", "Copies and buffers of offloaded layers", 900, 210);
    record_offloading();
    text(&p, 20, 26, START,
         "%d layers on one stage, time to the right. F, B: a layer's forward, backward; >: to the host, <: back",
         OFFLOADED_LAYERS);
    for (int i = 0; i < 4; i++) text(&p, 110, 65 + 30 * i, END, "%s", rows[i]);
    for (int64_t layer = 1; layer <= OFFLOADED_LAYERS; layer++) {
        stretch forward = layer_time(layer, false), backward = layer_time(layer, true);
        draw_named(&p, 50, &forward, fills[layer - 1], "F%d", layer);
        draw_named(&p, 50, &backward, fills[layer - 1], "B%d", layer);
    }
    stretch loss = {.begin = layer_time(0, false).begin, .end = layer_time(0, true).end};
    draw_named(&p, 50, &loss, GRID, "loss", 0);
    for (int i = 0; i < copies.count; i++) {
        stretch time = {.begin = copies.begin[i], .end = copies.end[i]};
        int64_t layer = i < copies.to_host ? i + 1 : copies.count - i;
        draw_named(&p, 80, &time, fills[layer - 1], i < copies.to_host ? ">%d" : "<%d", layer);
    }
    draw_buffers(&p, 110);
    text(&p, 120, 190, START, "A number in a buffer is the layer whose values lie in it.");
    picture_close(&p);
}

/* ---- 18: fp8 ----------------------------------------------------------------------------------------------------- */

enum { FP8_T = 128, FP8_N = 64, FP8_K = 512 };

/* The positive values of a format, on a logarithmic axis. */
static void draw_codes(picture *p, double y, const char *name, mt_dtype format, const char *fill) {
    for (int code = 1; code < 128; code++) {
        double value = (double)mt_f8_to_f32((uint8_t)code, format);
        if (!isfinite(value)) continue;
        double x = 120 + 22 * (log2(value) + 17);
        line(p, x, y - 16, x, y, code % (format == MT_F8_E4M3 ? 8 : 4) == 0 ? INK : fill, 1.2);
    }
    line(p, 120, y, 870, y, FAINT, 0.6);
    text(p, 108, y - 4, END, "%s", name);
}

/* Products of the picture: x[T, K] and w[N, K]. */
typedef enum operand_kind { EVEN, OUTLIER, SPREAD, NUM_OPERAND_KINDS } operand_kind;

/* Normal values; with one channel that is 1,000 times larger; or with tokens from 2^-20 to 1. */
static void fill_operand(float *x, int64_t rows, operand_kind kind, uint64_t seed) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < FP8_K; c++) {
            uint32_t words[4];
            mt_philox(words, seed, (uint64_t)(r * FP8_K + c), 0);
            double radius = sqrt(-2 * log(((double)words[0] + 1) / 4294967296.0));
            double value = radius * cos(2 * 3.14159265358979 * (double)words[1] / 4294967296.0);
            if (kind == OUTLIER && c == 77) value *= 1000;
            if (kind == SPREAD) value = ldexp(value, (int)(-20 * r / rows));
            x[r * FP8_K + c] = (float)value;
        }
}

static mt_fp8_matrix quantized(const float *x, int64_t rows, mt_fp8_blocks blocks, const float *scale) {
    mt_fp8_matrix m = {.stride = mt_fp8_stride(FP8_K, blocks), .format = MT_F8_E4M3, .blocks = blocks};
    float amax;
    m.data = mt_malloc(rows * m.stride);
    m.inverse_scales = mt_malloc(mt_fp8_num_scales(1, rows, m.stride, blocks) * 4);
    mt_quantize_args a = {.x = x, .count = 1, .R = rows, .C = FP8_K, .rows = m, .amax = &amax, .scale = scale};
    mt_cpu_ops.quantize(&a, MT_F32, NULL);
    return m;
}

/* The mean over tokens of |y - x w^T| / |x w^T|. */
static double product_error(const float *x, const float *w, const float *y) {
    double mean = 0;
    for (int64_t t = 0; t < FP8_T; t++) {
        double off = 0, norm = 0;
        for (int64_t n = 0; n < FP8_N; n++) {
            double sum = 0;
            for (int64_t k = 0; k < FP8_K; k++) sum += (double)x[t * FP8_K + k] * (double)w[n * FP8_K + k];
            off += pow((double)y[t * FP8_N + n] - sum, 2), norm += sum * sum;
        }
        mean += sqrt(off / norm) / FP8_T;
    }
    return mean;
}

/* The error of a recipe. Delayed: with the scale of normal values, as if these were the step before. */
static double recipe_error(const float *x, const float *w, mt_fp8_recipe recipe) {
    static const mt_fp8_blocks blocks[] = {MT_FP8_TENSOR, MT_FP8_TENSOR, MT_FP8_VECTOR_128, MT_FP8_VECTOR_32};
    static const mt_fp8_blocks of_weights[] = {MT_FP8_TENSOR, MT_FP8_TENSOR, MT_FP8_BLOCK_128, MT_FP8_VECTOR_32};
    const float before = 448 / 5.0f;
    float *y = mt_malloc(FP8_T * FP8_N * 4);
    mt_fp8_product_args p = {.M = FP8_T, .N = FP8_N, .K = FP8_K, .out = y, .out_dtype = MT_F32};
    p.a = quantized(x, FP8_T, blocks[recipe], recipe == MT_FP8_DELAYED ? &before : NULL);
    p.b = quantized(w, FP8_N, of_weights[recipe], NULL);
    mt_cpu_ops.fp8_product(&p, NULL);
    double error = product_error(x, w, y);
    free(p.a.data), free(p.a.inverse_scales), free(p.b.data), free(p.b.inverse_scales), free(y);
    return error;
}

/* The error of operands in bf16. */
static double bf16_error(const float *x, const float *w) {
    float *y = mt_calloc(FP8_T * FP8_N * 4);
    for (int64_t i = 0; i < FP8_T * FP8_N; i++)
        for (int64_t k = 0; k < FP8_K; k++)
            y[i] += mt_bf16_to_f32(mt_f32_to_bf16(x[i / FP8_N * FP8_K + k])) *
                    mt_bf16_to_f32(mt_f32_to_bf16(w[i % FP8_N * FP8_K + k]));
    double error = product_error(x, w, y);
    free(y);
    return error;
}

static void draw_error(picture *p, double x, double y, const char *name, double error, const char *fill) {
    double width = fmax(2, 45 * (log10(error) + 3.2)); // from 6e-4 on
    frame(p, x, y, width, 14, fill);
    text(p, x - 8, y + 11, END, "%s", name);
    text(p, x + width + 6, y + 11, START, error < 0.1 ? "%.4f" : "%.2f", error);
}

static void draw_fp8(const char *folder) {
    static const char *const titles[] = {"normal values", "one channel 1,000 times larger",
                                         "tokens from 1 down to 2^-20"};
    static const char *const recipes[] = {"delayed", "tensorwise", "blockwise", "mxfp8"};
    float *x = mt_malloc(FP8_T * FP8_K * 4), *w = mt_malloc(FP8_N * FP8_K * 4);
    picture p = picture_open(folder, "18-fp8", "Grids of fp8, and errors of products by recipe", 900, 330);
    text(&p, 20, 28, START, "All positive values of e4m3 and e5m2 (dark: powers of two)");
    draw_codes(&p, 66, "e4m3", MT_F8_E4M3, fills[ORANGE]);
    draw_codes(&p, 98, "e5m2", MT_F8_E5M2, fills[BLUE]);
    for (int power = -16; power <= 16; power += 4) text(&p, 120 + 22 * (power + 17), 116, MIDDLE, "%d", power);
    text(&p, 494, 133, MIDDLE, "log2 of the value");
    text(&p, 20, 160, START,
         "Relative error of a token's row of x w^T, K = %d, operands in bf16 or e4m3; mean of %d tokens; log scale",
         FP8_K, FP8_T);
    fill_operand(w, FP8_N, EVEN, 1);
    for (int kind = 0; kind < NUM_OPERAND_KINDS; kind++) {
        double left = 100 + 300 * kind;
        fill_operand(x, FP8_T, (operand_kind)kind, 2);
        text(&p, left, 188, START, "%s", titles[kind]);
        draw_error(&p, left, 200, "bf16", bf16_error(x, w), GRID);
        for (int recipe = 0; recipe < 4; recipe++)
            draw_error(&p, left, 222 + 22 * recipe, recipes[recipe], recipe_error(x, w, (mt_fp8_recipe)recipe),
                       fills[recipe]);
    }
    picture_close(&p);
    free(x), free(w);
}

/* ---- 19-ratios: the loss of a token of reinforcement learning by the ratio of new and old probability */

/* The loss at log-ratio x for an advantage, and its derivative by the log-probability. */
static double surrogate(double x, double advantage, double clip_ratio_c, double *dlogp) {
    const mt_policy_config config = {.clip_ratio_low = 0.2, .clip_ratio_high = 0.2, .clip_ratio_c = clip_ratio_c};
    const mt_span one = {0, 1, 0, 1, true};
    const float mask = 1;
    const double old = 0;
    const mt_loss_tokens token = {.T = 1,
                                  .num_sequences = 1,
                                  .sequences = &one,
                                  .mask = &mask,
                                  .logp = &x,
                                  .old_logp = &old,
                                  .advantages = &advantage,
                                  .dlogp = dlogp};
    mt_loss_sums sums = {0};
    *dlogp = 0;
    mt_policy_loss(&token, &config, &sums);
    return sums.loss;
}

static void draw_ratios(const char *folder) {
    static const char *const titles[] = {"advantage 1", "advantage -1, and dual clipping at 3"};
    const double width = 340, height = 200, top = 60, most = 4;
    picture p = picture_open(folder, "19-ratios", "Clipped losses of a token", 900, 310);
    for (int side = 0; side < 2; side++) {
        double left = 70 + 430 * side, advantage = side ? -1 : 1, lowest = side ? 0 : -2, before = 0;
        text(&p, left, 40, START, "loss of a token, %s", titles[side]);
        for (int i = 0; i <= 4; i++) {
            double x = left + width * i / most;
            line(&p, x, top, x, top + height, GRID, 0.6);
            text(&p, x, top + height + 18, MIDDLE, "%d", i);
            text(&p, left - 8, top + height - height * i / most + 4, END, "%g", lowest + i);
        }
        for (int i = 1; i <= 400; i++) {
            double ratio = most * i / 400, dlogp, loss = surrogate(log(ratio), advantage, side ? 3 : 0, &dlogp);
            double x = left + width * ratio / most, y = top + height * (1 - (loss - lowest) / most);
            if (i > 1) line(&p, x - width / 400, before, x, y, dlogp != 0 ? "#2f6db0" : "#c0561a", 2);
            before = y;
        }
        text(&p, left + width / 2, top + height + 36, MIDDLE, "ratio; orange: no gradient");
    }
    picture_close(&p);
}

/* ---- 20 to 27: charts ------------------------------------------------------------------------------------------- */

static const char *const strokes[] = {"#2f6db0", "#c0561a", "#2e7d32", "#8e5ea8", "#5b6470"};

/* A frame in which curves are drawn, from low to high on both axes; a logarithmic axis has powers of ten as marks. */
typedef struct chart {
    double left, top, width, height;
    double x_low, x_high, y_low, y_high;
    bool x_log, y_log;
} chart;

static double chart_place(double value, double low, double high, bool is_log) {
    return is_log ? log(value / low) / log(high / low) : (value - low) / (high - low);
}

/* Added to a coordinate: one half way between two decimals is printed alike by every compiler. */
static const double not_half_way = 1e-6;

static double chart_x(const chart *c, double x) {
    return c->left + c->width * chart_place(x, c->x_low, c->x_high, c->x_log) + not_half_way;
}

static double chart_y(const chart *c, double y) {
    return c->top + c->height * (1 - chart_place(y, c->y_low, c->y_high, c->y_log)) + not_half_way;
}

static void chart_mark_x(picture *p, const chart *c, double x, const char *label) {
    line(p, chart_x(c, x), c->top, chart_x(c, x), c->top + c->height, GRID, 0.6);
    text(p, chart_x(c, x), c->top + c->height + 18, MIDDLE, "%s", label);
}

static void chart_mark_y(picture *p, const chart *c, double y, const char *label) {
    line(p, c->left, chart_y(c, y), c->left + c->width, chart_y(c, y), GRID, 0.6);
    text(p, c->left - 8, chart_y(c, y) + 4, END, "%s", label);
}

static void chart_titles(picture *p, const chart *c, const char *y_title, const char *x_title) {
    text(p, c->left, c->top - 14, START, "%s", y_title);
    text(p, c->left + c->width / 2, c->top + c->height + 36, MIDDLE, "%s", x_title);
}

/* A curve through y[count] at x[count]; what leaves the frame is left out. */
static void chart_curve(picture *p, const chart *c, const double *x, const double *y, int count, const char *stroke) {
    bool pen = false;
    fprintf(p->file, "<path d=\"");
    for (int i = 0; i < count; i++) {
        bool inside = x[i] >= c->x_low && x[i] <= c->x_high && y[i] >= c->y_low && y[i] <= c->y_high;
        if (inside) fprintf(p->file, "%c%.1f %.1f", pen ? 'L' : 'M', chart_x(c, x[i]), chart_y(c, y[i]));
        pen = inside;
    }
    fprintf(p->file, "\" fill=\"none\" stroke=\"%s\" stroke-width=\"2\"/>\n", stroke);
}

/* A number beside a bar, with the grid hidden behind it. */
static void chart_value(picture *p, double x, double y, anchor anchor, int decimals, double value) {
    char words[32];
    snprintf(words, sizeof words, "%.*f", decimals, value);
    double width = letter_width * (double)strlen(words);
    box(p, anchor == END ? x - width - 1 : x - 1, y - 10, width + 2, 13, SHEET);
    text(p, x, y, anchor, "%s", words);
}

static void chart_legend(picture *p, double x, double y, const char *stroke, const char *name) {
    line(p, x, y - 4, x + 22, y - 4, stroke, 2);
    text(p, x + 30, y, START, "%s", name);
}

/* ---- 20: preferences --------------------------------------------------------------------------------------------- */

enum { MARGINS = 161 };

/* The loss of a pair with margin h at beta 1, and minus its derivative by h. */
static double pair_loss(mt_preference_variant variant, double h, double *pull) {
    const mt_preference_config config = {.variant = variant, .beta = 1};
    const mt_span sequences[] = {{0, 1, 0, 1, true}, {1, 1, 1, 1, true}};
    const float mask[] = {1, 1};
    const double logp[] = {h, 0};
    double dlogp[2] = {0};
    const mt_loss_tokens tokens = {
        .T = 2, .num_sequences = 2, .sequences = sequences, .mask = mask, .logp = logp, .dlogp = dlogp};
    mt_loss_sums sums = {0};
    mt_preference_loss(&tokens, &config, &sums);
    *pull = -dlogp[0];
    return sums.loss;
}

static void draw_preferences(const char *folder) {
    static const char *const names[] = {"sigmoid", "ipo", "hinge"};
    static const mt_preference_variant variants[] = {MT_PREFERENCE_SIGMOID, MT_PREFERENCE_IPO, MT_PREFERENCE_HINGE};
    picture p = picture_open(folder, "20-preferences", "Losses of a pair, and their derivatives", 900, 360);
    for (int side = 0; side < 2; side++) {
        chart c = {.left = 70 + 430 * side, .top = 60, .width = 360, .height = 220, .x_low = -2, .x_high = 4};
        c.y_low = side ? -1 : 0, c.y_high = side ? 2 : 3;
        text(&p, c.left - 50, 28, START, side ? "How hard the pair pulls its margin up" : "Loss of a pair, beta = 1");
        for (int i = -2; i <= 4; i++) {
            char label[16];
            snprintf(label, sizeof label, "%d", i);
            chart_mark_x(&p, &c, i, label);
            if (i >= c.y_low && i <= c.y_high) chart_mark_y(&p, &c, i, label);
        }
        chart_titles(&p, &c, side ? "minus its derivative" : "loss", "margin h");
        for (int v = 0; v < 3; v++) {
            double h[MARGINS], y[MARGINS], pull;
            for (int i = 0; i < MARGINS; i++) {
                h[i] = -2 + 6.0 * i / (MARGINS - 1);
                y[i] = pair_loss(variants[v], h[i], &pull);
                if (side) y[i] = pull;
            }
            chart_curve(&p, &c, h, y, MARGINS, strokes[v]);
            chart_legend(&p, c.left + 110 * v, 344, strokes[v], names[v]);
        }
    }
    picture_close(&p);
}

/* ---- 21: collectives --------------------------------------------------------------------------------------------- */

enum { REDUCERS = 4, SIZES_DRAWN = 121 };

/* Draws the slices of all ranks; a cell is darker and has more letters, the more ranks its sum includes. */
static void draw_slices(picture *p, double x, double y, int included[REDUCERS][REDUCERS]) {
    static const char *const shades[] = {SHEET, "#e3edf7", "#c3daf0", "#9cc3e6", "#f4b183"};
    for (int rank = 0; rank < REDUCERS; rank++)
        for (int slice = 0; slice < REDUCERS; slice++) {
            int parts = included[rank][slice];
            frame(p, x + 20 * slice, y + 20 * rank, 20, 20, shades[parts]);
            text(p, x + 20 * slice + 10, y + 20 * rank + 14, MIDDLE, "%d", parts);
        }
}

/* The ring of notes/examples/ring_all_reduce.c: how many ranks each slice's sum includes, after each step. */
static void draw_ring_steps(picture *p) {
    int included[REDUCERS][REDUCERS], sent[REDUCERS];
    for (int i = 0; i < REDUCERS * REDUCERS; i++) included[i / REDUCERS][i % REDUCERS] = 1;
    text(p, 20, 30, START, "Ring of 4 ranks: in a cell, the ranks whose values it sums");
    for (int step = -1; step < 2 * (REDUCERS - 1); step++) {
        int number = step + 1;
        double x = 78 + 112 * (number % 3), y = 70 + 122 * (number / 3);
        for (int rank = 0; rank < REDUCERS && step >= 0; rank++)
            sent[rank] = included[rank][(rank - step + 2 * REDUCERS) % REDUCERS];
        for (int rank = 0; rank < REDUCERS && step >= 0; rank++) {
            int from = (rank + REDUCERS - 1) % REDUCERS, slice = (from - step + 2 * REDUCERS) % REDUCERS;
            included[rank][slice] = step < REDUCERS - 1 ? included[rank][slice] + sent[from] : sent[from];
        }
        if (step < 0)
            text(p, x, y - 8, START, "start");
        else
            text(p, x, y - 8, START, "step %d: %s", step + 1, step < REDUCERS - 1 ? "add" : "copy");
        for (int rank = 0; rank < REDUCERS && number % 3 == 0; rank++)
            text(p, x - 8, y + 20 * rank + 14, END, "rank %d", rank);
        draw_slices(p, x, y, included);
    }
    text(p, 190, 410, START, "columns: slices of the buffer");
    text(p, 190, 428, START, "orange: the complete sum");
}

static void draw_collectives(const char *folder) {
    const double latency = 5e-6, per_byte = 1 / 50e9, ranks = 64, levels = 2 * log2(ranks);
    chart c = {.left = 500, .top = 70, .width = 350, .height = 290, .x_log = true, .y_log = true};
    c.x_low = 1e3, c.x_high = 1e9, c.y_low = 1e-5, c.y_high = 1;
    double bytes[SIZES_DRAWN], ring[SIZES_DRAWN], tree[SIZES_DRAWN], pieces[SIZES_DRAWN];
    for (int i = 0; i < SIZES_DRAWN; i++) {
        double n = bytes[i] = c.x_low * pow(c.x_high / c.x_low, (double)i / (SIZES_DRAWN - 1));
        ring[i] = 2 * (ranks - 1) * (latency + n * per_byte / ranks);
        tree[i] = levels * (latency + n * per_byte);
        double count = fmax(1, sqrt(levels * 2 * n * per_byte / latency));
        pieces[i] = (levels + count) * (latency + 2 * n * per_byte / count);
    }
    picture p = picture_open(folder, "21-collectives", "A ring all-reduce, and times of three algorithms", 900, 450);
    draw_ring_steps(&p);
    static const char *const sizes[] = {"1 KB", "10 KB", "100 KB", "1 MB", "10 MB", "100 MB", "1 GB"};
    static const char *const times[] = {"10 us", "100 us", "1 ms", "10 ms", "100 ms", "1 s"};
    for (int i = 0; i < 7; i++) chart_mark_x(&p, &c, c.x_low * pow(10, i), sizes[i]);
    for (int i = 0; i < 6; i++) chart_mark_y(&p, &c, c.y_low * pow(10, i), times[i]);
    text(&p, c.left, 30, START, "All-reduce over 64 ranks, 5 us a message, 50 GB/s");
    chart_titles(&p, &c, "time", "bytes of the buffer");
    chart_curve(&p, &c, bytes, ring, SIZES_DRAWN, strokes[0]);
    chart_curve(&p, &c, bytes, tree, SIZES_DRAWN, strokes[1]);
    chart_curve(&p, &c, bytes, pieces, SIZES_DRAWN, strokes[2]);
    chart_legend(&p, 500, 422, strokes[0], "ring");
    chart_legend(&p, 600, 422, strokes[1], "tree");
    chart_legend(&p, 700, 422, strokes[2], "two trees, pieces");
    picture_close(&p);
}

/* ---- the five collectives ---- */

/* A slice in the buffer of a rank: `from` is the rank whose values they are, REDUCERS if they are sums, -1 if there is
 * nothing; `slice` is the slice of that rank. */
typedef struct five_cell {
    int from, slice;
} five_cell;

static five_cell five_before(int operation, int rank, int slice) {
    bool has = operation == 2 ? slice == rank : operation != 4 || rank == 0; // all-gather, broadcast
    return (five_cell){has ? rank : -1, slice};
}

static five_cell five_after(int operation, int rank, int slice) {
    switch (operation) {
    case 0:
        return (five_cell){REDUCERS, slice};
    case 1:
        return (five_cell){slice == rank ? REDUCERS : -1, slice};
    case 2:
        return (five_cell){slice, slice};
    case 3:
        return (five_cell){slice, rank};
    default:
        return (five_cell){0, slice};
    }
}

static void draw_five(const char *folder) {
    enum { OPERATIONS = 5 };
    static const char *const names[OPERATIONS] = {"all-reduce", "reduce-scatter", "all-gather", "all-to-all",
                                                  "broadcast"};
    static const char *const sends[OPERATIONS] = {"2 (n - 1)/n N", "(n - 1)/n N", "(n - 1)/n N", "(n - 1)/n N",
                                                  "rank 0: N or more"};
    const double width = 30, height = 22;
    picture p = picture_open(folder, "21-five", "The five collectives on four ranks", 900, 380);
    text(&p, 20, 28, START,
         "4 ranks, a buffer of 4 slices: b2 is slice 2 of the values of rank 1, +2 the sum of a2, b2, c2 and d2");
    for (int operation = 0; operation < OPERATIONS; operation++) {
        double x = 76 + 166 * operation;
        text(&p, x + 2 * width, 60, MIDDLE, "%s", names[operation]);
        for (int after = 0; after < 2; after++)
            for (int rank = 0; rank < REDUCERS; rank++) {
                double y = (after ? 206 : 76) + height * rank;
                if (operation == 0) text(&p, x - 8, y + 15, END, "rank %d", rank);
                for (int slice = 0; slice < REDUCERS; slice++) {
                    five_cell cell = after ? five_after(operation, rank, slice) : five_before(operation, rank, slice);
                    static const int fill[REDUCERS + 1] = {BLUE, ORANGE, GREEN, YELLOW, PURPLE};
                    frame(&p, x + width * slice, y, width, height, cell.from < 0 ? "#ffffff" : fills[fill[cell.from]]);
                    if (cell.from >= 0)
                        text(&p, x + width * (slice + 0.5), y + 15, MIDDLE, "%c%d", "abcd+"[cell.from], cell.slice);
                }
            }
        double middle = x + 2 * width; // an arrow
        line(&p, middle, 172, middle, 196, INK, 1.2);
        line(&p, middle - 5, 190, middle, 196, INK, 1.2);
        line(&p, middle + 5, 190, middle, 196, INK, 1.2);
        text(&p, middle, 322, MIDDLE, "%s", sends[operation]);
    }
    text(&p, 20, 352, START,
         "The last line: bytes that a rank sends, N the bytes of four slices. An all-reduce is the next two, one after "
         "the other.");
    picture_close(&p);
}

/* ---- 22: attention ----------------------------------------------------------------------------------------------- */

/* The blocks of queries by keys of a causal span: computed as a whole, computed with a mask, or skipped. */
static void draw_blocks(picture *p, double x, double y) {
    enum { LENGTH = 1024, QUERIES = 64, KEYS = 128 };
    const mt_span span = {0, LENGTH, 0, LENGTH, true};
    const double cell = 18;
    for (int i0 = 0; i0 < LENGTH; i0 += QUERIES)
        for (int j0 = 0; j0 < LENGTH; j0 += KEYS) {
            int64_t begin, first_end, last_end;
            mt_span_keys(&span, 0, i0, &begin, &first_end);
            mt_span_keys(&span, 0, i0 + QUERIES - 1, &begin, &last_end);
            const char *fill = j0 >= last_end ? SHEET : j0 + KEYS <= first_end ? fills[BLUE] : fills[ORANGE];
            frame(p, x + 2 * cell * j0 / KEYS, y + cell * i0 / QUERIES, 2 * cell, cell, fill);
        }
    for (int i = 0; i <= LENGTH; i += 256) {
        text(p, x + 2 * cell * i / KEYS, y - 8, MIDDLE, "%d", i);
        text(p, x - 8, y + cell * i / QUERIES + 4, END, "%d", i);
    }
    text(p, x + 8 * cell, y - 24, MIDDLE, "key");
    text(p, x - 8, y - 24, END, "query");
    box(p, x, y + 18 * cell - 9, 10, 10, fills[BLUE]);
    text(p, x + 16, y + 18 * cell, START, "all visible");
    box(p, x + 120, y + 18 * cell - 9, 10, 10, fills[ORANGE]);
    text(p, x + 136, y + 18 * cell, START, "masked in part");
}

static void draw_attention(const char *folder) {
    enum { POINTS = 8, HEADS = 32, GROUPS = 8, CHANNELS = 128 };
    static const char *const lengths[POINTS] = {"1K", "2K", "4K", "8K", "16K", "32K", "64K", "128K"};
    static const char *const sizes[] = {"1 MiB", "16 MiB", "256 MiB", "4 GiB", "64 GiB", "1 TiB"};
    chart c = {.left = 540, .top = 70, .width = 320, .height = 288, .x_log = true, .y_log = true};
    c.x_low = 1024, c.x_high = 131072, c.y_low = 0x1p20, c.y_high = 0x1p40;
    double tokens[POINTS], matrix[POINTS], online[POINTS];
    picture p = picture_open(folder, "22-attention", "Blocks of attention, and bytes of a layer", 900, 450);
    text(&p, 20, 30, START, "Blocks of 64 queries by 128 keys of a sequence of 1,024 tokens");
    draw_blocks(&p, 90, 78);
    text(&p, 480, 30, START, "A layer of Llama 3 8B in bf16, one sequence");
    for (int i = 0; i < POINTS; i++) {
        double T = tokens[i] = 1024 << i;
        matrix[i] = 2 * HEADS * T * T;
        online[i] = 4 * (HEADS + GROUPS) * CHANNELS * T + 4 * HEADS * T;
        chart_mark_x(&p, &c, T, lengths[i]);
    }
    for (int i = 0; i < 6; i++) chart_mark_y(&p, &c, c.y_low * pow(16, i), sizes[i]);
    chart_titles(&p, &c, "bytes", "tokens of a sequence");
    chart_curve(&p, &c, tokens, matrix, POINTS, strokes[1]);
    chart_curve(&p, &c, tokens, online, POINTS, strokes[0]);
    chart_legend(&p, 540, 422, strokes[1], "probabilities");
    chart_legend(&p, 690, 422, strokes[0], "q, k, v, o and lse");
    picture_close(&p);
}

/* ---- 23: a kernel ------------------------------------------------------------------------------------------------ */

/* The 128-byte lines that one load of a warp touches: lane l reads `width` bytes at l * stride. */
static void draw_warp_load(picture *p, double y, const char *title, int64_t stride, int64_t width) {
    enum { LANES = 32, LINE = 128, CELLS = 32, BYTES = LINE / CELLS };
    bool used[LANES][CELLS] = {{false}};
    int64_t lines[LANES], count = 0, bytes = 0;
    for (int64_t lane = 0; lane < LANES; lane++) {
        int64_t at = lane * stride, found = 0;
        while (found < count && lines[found] != at / LINE) found++;
        if (found == count) lines[count++] = at / LINE;
        for (int64_t b = at % LINE; b < at % LINE + width; b++) used[found][b / BYTES] = true;
        bytes += width;
    }
    text(p, 20, y - 10, START, "%s", title);
    int64_t shown = count < 4 ? count : 4;
    for (int64_t l = 0; l < shown; l++) {
        frame(p, 20, y + 13 * (double)l, 6 * CELLS, 10, SHEET);
        for (int cell = 0; cell < CELLS; cell++)
            if (used[l][cell]) box(p, 20 + 6 * cell, y + 13 * (double)l + 0.5, 6, 9, fills[BLUE]);
    }
    text(p, 226, y + 9, START, "%lld line%s,", (long long)count, count > 1 ? "s" : "");
    text(p, 226, y + 24, START, "%lld of %lld bytes used", (long long)bytes, (long long)(count * LINE));
    if (shown < count) text(p, 226, y + 39, START, "(%lld lines drawn)", (long long)shown);
}

static void draw_kernel(const char *folder) {
    /* Percent of the copy rate, from notes/lab.md. */
    static const struct {
        const char *name;
        double percent;
    } steps[] = {{"1 a thread for each row", 3.8}, {"2 a block for each row", 60.9},     {"3 packs of 16 bytes", 82.1},
                 {"4 the row in registers", 85.7}, {"5 the weights with the row", 86.5}, {"6 launched early", 90.6},
                 {"a copy of as many bytes", 91.2}};
    enum { STEPS = sizeof steps / sizeof *steps };
    chart c = {.left = 590, .top = 70, .width = 260, .height = 240, .x_high = 100, .y_high = STEPS};
    picture p = picture_open(folder, "23-kernel", "Loads of a warp, and the measured steps", 900, 380);
    text(&p, 20, 30, START, "128-byte lines that a load of 32 lanes touches");
    draw_warp_load(&p, 80, "a lane for each row of 4,096 bf16", 2 * 4096, 2);
    draw_warp_load(&p, 180, "a lane for each channel", 2, 2);
    draw_warp_load(&p, 250, "a lane for each pack of 8 channels", 16, 16);
    text(&p, 420, 30, START, "RMSNorm, 8,192 x 4,096 in bf16, measured on one H200");
    for (int percent = 0; percent <= 100; percent += 25) {
        char label[16];
        snprintf(label, sizeof label, "%d%%", percent);
        chart_mark_x(&p, &c, percent, label);
    }
    chart_titles(&p, &c, "", "percent of the rate of a long copy");
    for (int i = 0; i < STEPS; i++) {
        double y = c.top + c.height * (i + 0.5) / STEPS, end = chart_x(&c, steps[i].percent);
        frame(&p, c.left, y - 9, end - c.left, 18, fills[i + 1 < STEPS ? BLUE : ORANGE]);
        text(&p, c.left - 8, y + 4, END, "%s", steps[i].name);
        chart_value(&p, end + 5, y + 4, START, 1, steps[i].percent);
    }
    picture_close(&p);
}

/* ---- A GPU for C programmers: grid, block and warp of notes/examples/kernels.cu ---------------------------------- */

/* A number of the program's source: "NAME = 128". */
static int kernel_number(const char *source, const char *name) {
    char wanted[32];
    snprintf(wanted, sizeof wanted, " %s = ", name);
    const char *found = strstr(source, wanted);
    if (!found) mt_die("notes/examples/kernels.cu has no%s", wanted);
    return atoi(found + strlen(wanted));
}

typedef struct product_sizes {
    int M, N, K, rows, cols, depth, stages, band; // a tile of rows x cols, depth channels of a step
} product_sizes;

static product_sizes read_product_sizes(void) {
    const char *path = "notes/examples/kernels.cu";
    int64_t bytes;
    mt_error error;
    char *source = mt_file_read(path, 1 << 20, &bytes, &error);
    if (!source) mt_die("%s", error.text);
    product_sizes s = {kernel_number(source, "M"),      kernel_number(source, "N"),    kernel_number(source, "K"),
                       kernel_number(source, "TILE"),   kernel_number(source, "WIDE"), kernel_number(source, "DEPTH"),
                       kernel_number(source, "STAGES"), kernel_number(source, "BAND")};
    free(source);
    return s;
}

/* The tiles of c; the first 132 blocks have their numbers' places in tile_of_block. */
static void draw_tiles(picture *p, double x, double y, const product_sizes *s) {
    enum { PROCESSORS = 132 }; // of an H200
    const double width = 13, height = 5;
    const int tile_cols = s->N / s->cols, tile_rows = s->M / s->rows, in_band = s->band * tile_cols;
    text(p, x, y - 26, START, "c: %d x %d tiles,", tile_rows, tile_cols);
    text(p, x, y - 11, START, "a block of threads for each");
    box(p, x, y, width * tile_cols, height * tile_rows, "#ffffff");
    for (int block = 0; block < tile_rows * tile_cols; block++) {
        int band = block / in_band, place = block % in_band;
        int row = band * s->band + place % s->band, col = place / s->band;
        if (block >= PROCESSORS) continue;
        box(p, x + width * col, y + height * row, width, height, fills[BLUE]);
        if (block == 20) box(p, x + width * col, y + height * row, width, height, fills[ORANGE]);
    }
    for (int row = 0; row <= tile_rows; row++)
        line(p, x, y + height * row, x + width * tile_cols, y + height * row, row % s->band ? GRID : INK, 0.6);
    for (int col = 0; col <= tile_cols; col++)
        line(p, x + width * col, y, x + width * col, y + height * tile_rows, GRID, 0.6);
    double below = y + height * tile_rows + 20;
    box(p, x, below - 9, 10, 10, fills[BLUE]);
    text(p, x + 16, below, START, "blocks 0 to %d, at one time", PROCESSORS - 1);
    box(p, x, below + 7, 10, 10, fills[ORANGE]);
    text(p, x + 16, below + 16, START, "block 20; lines: bands");
    text(p, x + 16, below + 32, START, "of %d rows of tiles", s->band);
}

/* The stages of an operand behind each other. */
static void draw_stages(picture *p, double x, double y, double width, double height, const product_sizes *s) {
    for (int stage = s->stages - 1; stage >= 0; stage--)
        frame(p, x - 4 * stage, y - 4 * stage, width, height, stage ? "#ffffff" : fills[GREEN]);
}

static void draw_tile(picture *p, double x, double y, const product_sizes *s) {
    enum { WARPS = 8 };
    const double scale = 0.98, width = scale * s->cols, height = scale * s->rows, depth = scale * s->depth;
    const int bytes = (s->rows + s->cols) * s->depth * 2;
    text(p, x, y - 26, START, "a block: its tile of %d x %d", s->rows, s->cols);
    text(p, x, y - 11, START, "and a step of %d channels", s->depth);
    x += 14, y += 24;
    draw_stages(p, x + depth + 24, y, width, depth, s);
    text(p, x + depth + 24 + width / 2, y + depth / 2 + 4, MIDDLE, "%d rows of b", s->cols);
    draw_stages(p, x, y + depth + 24, depth, height, s);
    text(p, x + depth / 2, y + depth + 24 + height / 2 - 3, MIDDLE, "%d rows", s->rows);
    text(p, x + depth / 2, y + depth + 24 + height / 2 + 11, MIDDLE, "of a");
    for (int warp = 0; warp < WARPS; warp++) {
        double top = y + depth + 24 + height / WARPS * warp;
        frame(p, x + depth + 24, top, width, height / WARPS, fills[warp < WARPS / 2 ? BLUE : ORANGE]);
        text(p, x + depth + 32, top + 12, START, "warp %d: rows %d to %d", warp, s->rows / WARPS * warp,
             s->rows / WARPS * (warp + 1) - 1);
    }
    double below = y + depth + 24 + height + 22;
    box(p, x, below - 9, 10, 10, fills[BLUE]);
    text(p, x + 16, below, START, "warpgroup 0");
    box(p, x + 120, below - 9, 10, 10, fills[ORANGE]);
    text(p, x + 136, below, START, "warpgroup 1: sums in registers");
    box(p, x, below + 9, 10, 10, fills[GREEN]);
    text(p, x + 16, below + 18, START, "shared memory: %d KB a stage, %d stages,", bytes / 1024, s->stages);
    text(p, x + 16, below + 34, START, "which TMA fills for one more warp");
}

/* Which lane holds each element of mma's result: element i of a lane is at row lane / 4 + 8 (i / 2). */
static void draw_lanes(picture *p, double x, double y) {
    enum { LANES = 32, SHOWN = 5 };
    const double width = 24, height = 17;
    text(p, x, y - 26, START, "a warp: the lane that has each");
    text(p, x, y - 11, START, "of 16 x 8 sums (four a lane)");
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++) {
            double left = x + width * (lane % 4 * 2 + i % 2), top = y + height * (lane / 4 + i / 2 * 8);
            frame(p, left, top, width, height, lane == SHOWN ? fills[PURPLE] : "#ffffff");
            text(p, left + width / 2, top + 12, MIDDLE, "%d", lane);
        }
    text(p, x, y + 16 * height + 20, START, "%d x %d sums of a warp: %d such", 16, 256, 256 / 8);
    text(p, x, y + 16 * height + 36, START, "blocks, %d sums a lane", 4 * 256 / 8);
}

static void draw_gpu(const char *folder) {
    const product_sizes sizes = read_product_sizes();
    picture p = picture_open(folder, "gpus", "Grid, block and warp of a matrix product", 900, 450);
    draw_tiles(&p, 24, 60, &sizes);
    draw_tile(&p, 262, 60, &sizes);
    draw_lanes(&p, 680, 60);
    picture_close(&p);
}

/* ---- 24: generation ---------------------------------------------------------------------------------------------- */

enum { TEXTS = 7, TEXT_SLOTS = 3, TEXT_LENGTH = 16, TEXT_ROWS = 4, TEXT_PROMPT = 6, TEXT_FORWARD = 8 };

/* Texts to generate, without a model: every drawn token is 1. */
typedef struct texts {
    mt_batcher *batcher;
    mt_sequence sequences[TEXTS];
    int32_t tokens[TEXTS][TEXT_LENGTH];
} texts;

/* `alike`: all prompts are equal. */
static void texts_begin(texts *t, const int *new_tokens, bool alike) {
    const mt_batcher_plan plan = {.max_sequences = TEXT_SLOTS,
                                  .max_length = TEXT_LENGTH,
                                  .max_tokens = TEXT_FORWARD,
                                  .page_rows = TEXT_ROWS,
                                  .num_pages = 16};
    t->batcher = mt_batcher_create(&plan);
    for (int i = 0; i < TEXTS; i++) {
        for (int j = 0; j < TEXT_PROMPT; j++) t->tokens[i][j] = alike ? 2 + j : 100 * i + j;
        t->sequences[i] = (mt_sequence){.id = i,
                                        .tokens = t->tokens[i],
                                        .num_prompt = TEXT_PROMPT,
                                        .num_tokens = TEXT_PROMPT,
                                        .max_tokens = TEXT_PROMPT + new_tokens[i],
                                        .slot = -1,
                                        .finish = MT_UNFINISHED};
    }
}

/* One forward; rows[i] is the number of tokens of text i in it. False at the end. */
static bool texts_step(texts *t, int64_t *rows) {
    mt_batcher *b = t->batcher;
    memset(rows, 0, TEXTS * sizeof *rows);
    if (mt_batcher_next(b, t->sequences, TEXTS) == 0) return false;
    for (int64_t s = 0; s < b->batch.num_spans; s++)
        for (int i = 0; i < TEXTS; i++)
            if (t->sequences[i].slot == b->batch.spans[s].k_start / TEXT_LENGTH) rows[i] = b->batch.spans[s].q_len;
    for (int64_t l = 0; l < b->num_logits; l++) {
        mt_sequence *sequence = &t->sequences[b->logit_sequences[l]];
        sequence->tokens[sequence->num_tokens++] = 1;
        if (sequence->num_tokens == sequence->max_tokens) sequence->finish = MT_FINISH_LENGTH;
    }
    return true;
}

static void draw_forward_cell(picture *p, double x, double y, int64_t rows, bool is_prompt) {
    if (rows == 0) return;
    frame(p, x, y, 22, 18, fills[is_prompt ? ORANGE : BLUE]);
    text(p, x + 11, y + 13, MIDDLE, "%lld", (long long)rows);
}

/* Batches of TEXT_SLOTS texts that begin and end together, each prompt in one forward. Returns the forwards. */
static int draw_static_batches(picture *p, double x, double y, const int *new_tokens) {
    int begin = 0;
    for (int first = 0; first < TEXTS; first += TEXT_SLOTS) {
        int longest = 0;
        for (int i = first; i < first + TEXT_SLOTS && i < TEXTS; i++) {
            for (int f = 0; f < new_tokens[i]; f++)
                draw_forward_cell(p, x + 22 * (begin + f), y + 20 * i, f == 0 ? TEXT_PROMPT : 1, f == 0);
            longest = new_tokens[i] > longest ? new_tokens[i] : longest;
        }
        for (int i = first; i < first + TEXT_SLOTS && i < TEXTS;
             i++) // complete, and in the batch until its last text is
            box(p, x + 22 * (begin + new_tokens[i]), y + 20 * i, 22 * (longest - new_tokens[i]), 18, "#e4e6e0");
        begin += longest;
    }
    return begin;
}

/* The page table after all of three equal prompts are read. */
static void draw_pages(picture *p, double x, double y) {
    static const int new_tokens[TEXTS] = {6, 6, 6, 1, 1, 1, 1};
    texts t;
    int64_t rows[TEXTS];
    texts_begin(&t, new_tokens, true);
    for (int forward = 0; forward < 4; forward++) texts_step(&t, rows);
    text(p, x, y - 40, START, "Pages of %d tokens, three", TEXT_ROWS);
    text(p, x, y - 24, START, "samples of one prompt of %d", TEXT_PROMPT);
    for (int i = 0; i < 3; i++) {
        int64_t slot = t.sequences[i].slot, pages = mt_divide_up(t.sequences[i].num_tokens - 1, TEXT_ROWS);
        text(p, x, y + 26 * i + 16, START, "sample %d", i);
        for (int64_t page = 0; page < pages; page++) {
            int32_t number = t.batcher->batch.pages[slot * TEXT_LENGTH / TEXT_ROWS + page];
            bool shared = t.batcher->batch.pages[t.sequences[0].slot * TEXT_LENGTH / TEXT_ROWS + page] == number &&
                          t.batcher->batch.pages[t.sequences[1].slot * TEXT_LENGTH / TEXT_ROWS + page] == number;
            frame(p, x + 70 + 34 * (double)page, y + 26 * i, 34, 22, fills[shared ? GREEN : BLUE]);
            text(p, x + 87 + 34 * (double)page, y + 26 * i + 15, MIDDLE, "%d", number);
        }
    }
    text(p, x, y + 104, START, "numbers: pages of the cache");
    box(p, x, y + 113, 10, 10, fills[GREEN]);
    text(p, x + 16, y + 122, START, "shared");
    mt_batcher_destroy(t.batcher);
}

static void draw_generation(const char *folder) {
    static const int new_tokens[TEXTS] = {3, 9, 4, 2, 6, 3, 5};
    const double x = 150, top = 76, below = 272;
    texts t;
    int64_t rows[TEXTS];
    int forwards = 0;
    picture p = picture_open(folder, "24-generation", "Continuous and static batching, and shared pages", 900, 470);
    texts_begin(&t, new_tokens, false);
    bool begun[TEXTS] = {false};
    for (; texts_step(&t, rows); forwards++)
        for (int i = 0; i < TEXTS; i++) {
            draw_forward_cell(&p, x + 22 * forwards, top + 20 * i, rows[i], !begun[i]);
            begun[i] = begun[i] || t.sequences[i].num_tokens > TEXT_PROMPT;
        }
    mt_batcher_destroy(t.batcher);
    text(&p, 20, 30, START, "Continuous batching: %d texts, %d at once, %d forwards of at most %d tokens", TEXTS,
         TEXT_SLOTS, forwards, TEXT_FORWARD);
    forwards = draw_static_batches(&p, x, below, new_tokens);
    text(&p, 20, below - 24, START, "Static batches: %d forwards", forwards);
    for (int i = 0; i < TEXTS; i++)
        for (int part = 0; part < 2; part++)
            text(&p, x - 10, (part ? below : top) + 20 * i + 13, END, "text %d, %d new", i, new_tokens[i]);
    for (int f = 0; f < forwards; f++) text(&p, x + 22 * f + 11, below + 20 * TEXTS + 14, MIDDLE, "%d", f + 1);
    text(&p, x + 11 * forwards, below + 20 * TEXTS + 34, MIDDLE, "forward; in a cell: tokens of the text in it");
    box(&p, 660, 270, 10, 10, fills[ORANGE]);
    text(&p, 676, 279, START, "reads the prompt");
    box(&p, 660, 290, 10, 10, fills[BLUE]);
    text(&p, 676, 299, START, "one token, and writes one");
    box(&p, 660, 310, 10, 10, "#e4e6e0");
    text(&p, 676, 319, START, "complete, waits for the batch");
    draw_pages(&p, 660, 100);
    picture_close(&p);
}

/* ---- 25: packing ------------------------------------------------------------------------------------------------- */

enum { PACKED_SAMPLES = 30, PACKED_ROW = 1024, DYNAMIC_SAMPLES = 72, DYNAMIC_RANKS = 8, DYNAMIC_LONGEST = 65536 };

/* A sample in a row that begins at x; `scale` pixels a token. */
static void draw_sample(picture *p, double x, double y, double scale, int64_t at, int64_t length, int64_t number) {
    double width = scale * (double)length;
    frame(p, x + scale * (double)at, y, width, 14, fills[number % NUM_FILLS]);
    if (width > 22) text(p, x + scale * (double)at + width / 2, y + 11, MIDDLE, "%lld", (long long)length);
}

static void draw_packed_rows(picture *p, double x, double y) {
    const double scale = 330.0 / PACKED_ROW;
    int64_t lengths[PACKED_SAMPLES], total = 0;
    mt_rows rows;
    for (int64_t i = 0; i < PACKED_SAMPLES; i++)
        total += lengths[i] = mt_lognormal_length(8, i, 110, MT_MOCK_SIGMA, PACKED_ROW);
    mt_rows_pack(&rows, lengths, PACKED_SAMPLES, PACKED_ROW, PACKED_SAMPLES, 1, 0);
    text(p, x, y - 24, START, "%d samples in %lld rows of %d tokens:", PACKED_SAMPLES, (long long)rows.count,
         PACKED_ROW);
    text(p, x, y - 8, START, "%.0f%% full; one in each row: %.0f%%",
         100 * (double)total / (double)(rows.count * PACKED_ROW),
         100 * (double)total / (PACKED_SAMPLES * (double)PACKED_ROW));
    for (int64_t r = 0; r < rows.count; r++) {
        int64_t at = 0;
        double top = y + 18 * (double)r;
        frame(p, x, top, scale * PACKED_ROW, 14, SHEET);
        for (int64_t i = rows.first[r]; i < rows.first[r + 1]; at += lengths[rows.order[i++]])
            draw_sample(p, x, top, scale, at, lengths[rows.order[i]], rows.order[i]);
    }
    double end = y + 18 * (double)rows.count;
    for (int64_t tokens = 0; tokens <= PACKED_ROW; tokens += 256)
        text(p, x + scale * (double)tokens, end + 14, MIDDLE, "%lld", (long long)tokens);
    text(p, x + scale * PACKED_ROW / 2, end + 32, MIDDLE, "tokens of a row");
    mt_rows_free(&rows);
}

/* Draws the batches of a plan; `ranks` of the picture share one of the plan's. Work becomes seconds at 600 TFLOP/s. */
static void draw_plan(picture *p, const chart *c, const mt_step_plan *plan, int64_t ranks, bool meets) {
    double *start = mt_calloc(mt_max(plan->num_batches, 1) * 8);
    mt_step_plan_time(plan, meets, start);
    for (int64_t slot = 0; slot < plan->num_slots; slot++)
        for (int64_t r = 0; r < plan->num_ranks; r++) {
            int64_t b = plan->batch_of[slot * plan->num_ranks + r];
            int64_t size = ranks > 1 ? ranks : plan->batches[b].context_size, color = 0;
            while ((int64_t)1 << color < size) color++;
            double x = chart_x(c, start[b] / 600e12), width = plan->batches[b].work / 600e12 * c->width / c->x_high;
            if (ranks > 1 || r == 0 || plan->batch_of[slot * plan->num_ranks + r - 1] != b)
                frame(p, x, c->top + 16 * (double)(r * ranks), width, 16 * (double)size, fills[color]);
        }
    free(start);
}

/* Plans of a step for 8 ranks, static and dynamic, of the shape of Llama 2 7B. */
static void draw_dynamic_context(picture *p, const chart *fixed, const chart *dynamic) {
    static const char *const words[] = {"--num-layers",
                                        "32",
                                        "--hidden-size",
                                        "4096",
                                        "--ffn-hidden-size",
                                        "11008",
                                        "--lr",
                                        "1e-3",
                                        "--num-attention-heads",
                                        "32",
                                        "--swiglu",
                                        "--vocab-size",
                                        "32000",
                                        "--train-iters",
                                        "1",
                                        "--max-position-embeddings",
                                        "64"};
    mt_run_options o;
    mt_rows rows;
    mt_step_plan plan;
    int64_t lengths[DYNAMIC_SAMPLES], first[DYNAMIC_SAMPLES + 1] = {0}, count = 0;
    mt_piece pieces[DYNAMIC_SAMPLES];
    parse_options(&o, words, sizeof words / sizeof *words);
    mt_plan_shape shape = {1, 1, DYNAMIC_LONGEST, .work = mt_token_work_of(&o.stack)};
    for (int64_t i = 0; i < DYNAMIC_SAMPLES; i++)
        lengths[i] = mt_lognormal_length(11, i, 2048, MT_MOCK_SIGMA, DYNAMIC_LONGEST);
    mt_rows_pack(&rows, lengths, DYNAMIC_SAMPLES, DYNAMIC_LONGEST, DYNAMIC_SAMPLES, 1, 0);
    for (int64_t r = 0; r < rows.count; first[++r] = count)
        for (int64_t i = rows.first[r]; i < rows.first[r + 1]; i++)
            pieces[count++] = (mt_piece){rows.order[i], lengths[rows.order[i]], 0};
    mt_step_plan_balance(&plan, pieces, first, rows.count, &shape);
    for (int64_t b = 0; b < plan.num_batches; b++) { // each row on all ranks
        double tokens = 0, pairs = 0;
        for (int64_t i = plan.batches[b].first; i < plan.batches[b].first + plan.batches[b].count; i++)
            tokens += (double)plan.pieces[i].length, pairs += pow((double)plan.pieces[i].length, 2);
        plan.batches[b].work = mt_shared_work(&shape.work, tokens, pairs, DYNAMIC_RANKS);
    }
    draw_plan(p, fixed, &plan, DYNAMIC_RANKS, false);
    mt_step_plan_free(&plan);
    shape.num_ranks = shape.context_size = DYNAMIC_RANKS;
    shape.min_context_size = 1, shape.rank_tokens = DYNAMIC_LONGEST / DYNAMIC_RANKS;
    mt_step_plan_solve(&plan, pieces, count, &shape);
    draw_plan(p, dynamic, &plan, 1, false);
    mt_step_plan_free(&plan);
    mt_rows_free(&rows);
    mt_options_free(&o);
}

static void draw_packing(const char *folder) {
    chart c = {.left = 500, .top = 64, .width = 370, .height = 128, .x_high = 5, .y_high = DYNAMIC_RANKS};
    chart fixed = c, dynamic = c;
    dynamic.top = 236;
    picture p = picture_open(folder, "25-packing", "Packed rows, and dynamic context parallelism", 900, 460);
    draw_packed_rows(&p, 30, 60);
    text(&p, 430, 30, START, "A step of Llama 2 7B on 8 ranks, predicted: every row on all ranks");
    text(&p, 430, 222, START, "each sample on 1, 2, 4 or 8");
    for (int part = 0; part < 2; part++) {
        const chart *at = part ? &dynamic : &fixed;
        for (int r = 0; r < DYNAMIC_RANKS; r++) text(&p, 490, at->top + 16 * r + 12, END, "rank %d", r);
        line(&p, at->left, at->top + 128, at->left + at->width, at->top + 128, GRID, 0.6);
    }
    for (int second = 0; second <= 5; second++) {
        char label[16];
        snprintf(label, sizeof label, "%d", second);
        chart_mark_x(&p, &dynamic, second, label);
    }
    draw_dynamic_context(&p, &fixed, &dynamic);
    text(&p, 685, dynamic.top + 128 + 36, MIDDLE, "seconds");
    for (int k = 0; k < 4; k++) {
        box(&p, 500 + 95 * k, 425, 10, 10, fills[k]);
        text(&p, 516 + 95 * k, 434, START, "%d rank%s", 1 << k, k ? "s" : "");
    }
    picture_close(&p);
}

/* ---- 26: adapters ------------------------------------------------------------------------------------------------ */

/* W [N, K] beside B [N, r] and A [r, K], and how two tensor-parallel ranks cut them. */
static void draw_cut_adapter(picture *p, double x, double y, const char *title, bool is_column) {
    const double wide = 130, high = 110, rank = 22;
    text(p, x, y - 22, START, "%s", title);
    for (int r = 0; r < 2; r++) {
        const char *fill = fills[r ? ORANGE : BLUE];
        if (is_column) {
            frame(p, x, y + high / 2 * r, wide, high / 2, fill);
            frame(p, x + wide + 40, y + high / 2 * r, rank, high / 2, fill);
        } else {
            frame(p, x + wide / 2 * r, y, wide / 2, high, fill);
            frame(p, x + wide + 80 + wide / 2 * r, y + 44, wide / 2, rank, fill);
        }
    }
    if (is_column)
        frame(p, x + wide + 80, y + 44, wide, rank, fills[GREEN]);
    else
        frame(p, x + wide + 40, y, rank, high, fills[GREEN]);
    text(p, x + wide + 20, y + high / 2 + 4, MIDDLE, "+");
    text(p, x + wide + 71, y + high / 2 + 4, MIDDLE, "x");
    text(p, x + wide / 2, y + high + 16, MIDDLE, "W [N, K]");
    text(p, x + wide + 40 + rank / 2, y + high + 16, MIDDLE, "B [N, r]");
    text(p, x + wide + 80 + wide / 2, y + 44 + rank + 16, MIDDLE, "A [r, K]");
}

/* GiB of a table's rows without data parallelism: in bf16 18 bytes for each trained parameter, 2 for the others. */
static double trained_gib(int64_t lora_rank, double *trained) {
    mt_run_options o;
    char rank[16];
    snprintf(rank, sizeof rank, "%lld", (long long)lora_rank);
    const char *const words[] = {"--hf-config",
                                 "data/configs/llama3-8b.json",
                                 "--global-batch-size",
                                 "4",
                                 "--train-iters",
                                 "1",
                                 "--lr",
                                 "1e-3",
                                 "--bf16",
                                 "--lora-rank",
                                 rank,
                                 "--lora-target",
                                 "all-linear"};
    int count = sizeof words / sizeof *words;
    parse_options(&o, words, lora_rank > 0 ? count : count - 4);
    table t = table_open(&o.stack);
    double frozen = 0;
    *trained = 0;
    for (int64_t i = 0; i < t.count; i++) {
        double elements = (double)(t.rows[i].rows * t.rows[i].cols);
        *(lora_rank == 0 || mt_param_is_adapter(&t.rows[i]) ? trained : &frozen) += elements;
    }
    table_close(&t);
    mt_options_free(&o);
    return (2 * frozen + 18 * *trained) / 0x1p30;
}

static void draw_adapters(const char *folder) {
    static const int64_t ranks[] = {0, 256, 64, 16, 4};
    const double left = 560, width = 270;
    picture p = picture_open(folder, "26-adapters", "Adapters on two ranks, and memory by rank", 900, 400);
    draw_cut_adapter(&p, 30, 76, "column parallel: N is cut, and B with it", true);
    draw_cut_adapter(&p, 30, 250, "row parallel: K is cut, and A with it", false);
    box(&p, 30, 19, 10, 10, fills[BLUE]);
    text(&p, 46, 28, START, "rank 0");
    box(&p, 110, 19, 10, 10, fills[ORANGE]);
    text(&p, 126, 28, START, "rank 1");
    box(&p, 190, 19, 10, 10, fills[GREEN]);
    text(&p, 206, 28, START, "both");
    text(&p, 440, 28, START, "Llama 3 8B, bf16: weights, gradients and optimizer's state, GiB");
    chart c = {.left = left, .top = 50, .width = width, .height = 250, .x_high = 150, .y_high = 1};
    for (int i = 0; i <= 3; i++) {
        char label[16];
        snprintf(label, sizeof label, "%d", 50 * i);
        chart_mark_x(&p, &c, 50 * i, label);
    }
    text(&p, left + width / 2, c.top + c.height + 36, MIDDLE, "GiB");
    for (int i = 0; i < 5; i++) {
        double trained, gib = trained_gib(ranks[i], &trained), y = 64 + 48 * i;
        frame(&p, left, y, width * gib / 150, 24, fills[i == 0 ? ORANGE : BLUE]);
        if (i == 0)
            text(&p, left - 10, y + 10, END, "all trained");
        else
            text(&p, left - 10, y + 10, END, "rank %lld", (long long)ranks[i]);
        text(&p, left - 10, y + 24, END, "%.0f M", trained * 1e-6);
        chart_value(&p, left + width * gib / 150 + 8, y + 16, START, 1, gib);
    }
    picture_close(&p);
}

/* ---- 27: divergence ---------------------------------------------------------------------------------------------- */

enum { DESCENT_STEPS = 80, MAGNITUDES = 481 };

/* Gradient descent on (slow^2 + 20 fast^2) / 2, from a fast direction that is almost right. */
static void draw_descent(picture *p, const chart *c, double rate, const char *stroke) {
    double steps[DESCENT_STEPS], loss[DESCENT_STEPS], slow = 1, fast = 1e-3;
    for (int i = 0; i < DESCENT_STEPS; i++) {
        steps[i] = i, loss[i] = (slow * slow + 20 * fast * fast) / 2;
        slow *= 1 - rate, fast *= 1 - 20 * rate;
    }
    chart_curve(p, c, steps, loss, DESCENT_STEPS, stroke);
}

/* The distance to the next number of a format, by magnitude; `bits` of the significand are stored. */
static void draw_spacing(picture *p, const chart *c, int bits, int least, double largest, const char *stroke) {
    double magnitude[MAGNITUDES], spacing[MAGNITUDES];
    int count = 0;
    for (; count < MAGNITUDES; count++) {
        double x = magnitude[count] = c->x_low * pow(c->x_high / c->x_low, (double)count / (MAGNITUDES - 1));
        int power = (int)floor(log2(x) + 1e-9);
        if (x > largest) break;
        spacing[count] = ldexp(1, (power > least ? power : least) - bits);
    }
    chart_curve(p, c, magnitude, spacing, count, stroke);
}

static void draw_divergence(const char *folder) {
    static const char *const decades[] = {"0.001", "0.01", "0.1", "1", "10", "100", "1,000", "10,000", "100,000"};
    static const double rates[] = {0.05, 0.095, 0.104, 0.115};
    chart left = {.left = 70, .top = 70, .width = 330, .height = 270, .x_high = DESCENT_STEPS - 1, .y_log = true};
    left.y_low = 1e-6, left.y_high = 10;
    chart right = {.left = 530, .top = 70, .width = 340, .height = 270, .x_log = true, .y_log = true};
    right.x_low = 1e-3, right.x_high = 1e5, right.y_low = 1e-12, right.y_high = 1e3;
    picture p = picture_open(folder, "27-divergence", "Step size and stability, and the spacing of formats", 900, 430);
    text(&p, 20, 30, START, "Gradient descent, curvatures 1 and 20");
    for (int i = 0; i <= 60; i += 20) {
        char label[16];
        snprintf(label, sizeof label, "%d", i);
        chart_mark_x(&p, &left, i, label);
    }
    for (int power = -6; power <= 0; power += 2) {
        char label[16];
        snprintf(label, sizeof label, "1e%+d", power);
        chart_mark_y(&p, &left, pow(10, power), power ? label : "1");
    }
    chart_titles(&p, &left, "loss", "step");
    for (int i = 0; i < 4; i++) {
        char name[32];
        draw_descent(&p, &left, rates[i], strokes[i]);
        snprintf(name, sizeof name, "%.2f", 20 * rates[i]);
        chart_legend(&p, 70 + 88 * i, 414, strokes[i], name);
    }
    text(&p, 70, 396, START, "rate times the greater curvature:");
    text(&p, 450, 30, START, "Distance to the next number");
    for (int i = 0; i < 9; i += 2) chart_mark_x(&p, &right, pow(10, i - 3), decades[i]);
    for (int power = -12; power <= 3; power += 3) {
        char label[16];
        snprintf(label, sizeof label, "1e%+d", power);
        chart_mark_y(&p, &right, pow(10, power), power ? label : "1");
    }
    chart_titles(&p, &right, "distance", "magnitude of the number");
    draw_spacing(&p, &right, 3, -6, 448, strokes[1]);
    draw_spacing(&p, &right, 7, -126, INFINITY, strokes[0]);
    draw_spacing(&p, &right, 10, -14, 65504, strokes[2]);
    draw_spacing(&p, &right, 23, -126, INFINITY, strokes[4]);
    static const struct {
        const char *name;
        int stroke;
    } formats[] = {{"e4m3", 1}, {"bf16", 0}, {"fp16", 2}, {"fp32", 4}};
    for (int i = 0; i < 4; i++) chart_legend(&p, 530 + 88 * i, 414, strokes[formats[i].stroke], formats[i].name);
    picture_close(&p);
}

/* ---- 28: predicted and measured steps ---------------------------------------------------------------------------- */

/* Field `number` of a row of fields between bars, without blanks around it; "" if there is none. */
static void row_field(char field[1024], const char *row, int number) {
    while (number > 0 && *row) number -= *row++ == '|';
    while (*row == ' ') row++;
    size_t length = strcspn(row, "|\n");
    while (length > 0 && row[length - 1] == ' ') length--;
    snprintf(field, 1024, "%.*s", (int)length, row);
}

/* The arguments of a row of tests/bench_gpu.txt. */
static void bench_arguments(char arguments[1024], const char *kind, const char *name) {
    char line[2048], field[1024];
    FILE *file = fopen("tests/bench_gpu.txt", "r");
    *arguments = 0;
    while (file && fgets(line, sizeof line, file)) {
        row_field(field, line, 0);
        if (strcmp(field, kind) != 0) continue;
        row_field(field, line, 1);
        if (strcmp(field, name) == 0) row_field(arguments, line, 5);
    }
    if (file) fclose(file);
}

/* Tokens per second that a simulated step of these arguments makes. */
static double predicted_rate(const char *gpu, int64_t gpus, const char *arguments, mt_run_options *o) {
    char words[2048], *argv[128];
    int argc = 0;
    mt_error error;
    mt_machine machine;
    mt_simulation simulation;
    snprintf(words, sizeof words, "train --mock-data --bf16 --lr 1e-5 --train-iters 1 --gpu %s %s", gpu, arguments);
    for (char *word = strtok(words, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    check(mt_options_parse(o, MT_PROGRAM_TRAIN, argc, argv, &error), &error);
    check(mt_train_options_finish(o, gpus, &error), &error);
    check(mt_machine_read(&machine, gpu, &error), &error);
    machine.memory_gib = INFINITY; // only times are drawn; NVIDIA's programs need other communicators
    check(mt_simulate(&simulation, &o->stack, gpus, &machine, &error), &error);
    double rate = simulation.tokens_per_second;
    mt_simulation_free(&simulation);
    return rate;
}

/* A measured step and its prediction. */
typedef struct compared_step {
    char gpu[64], name[100], figure[32]; // the machine's name; as measured, with its unit
    int gpus, set;                       // 0: measured here, 1: published of A100, 2: of H100
    double ratio;                        // of tokens per second, predicted / measured
} compared_step;

enum { MAX_STEPS = 256, STEP_SETS = 3 };

/* Adds a row; of a machine's file the part after "machine_". */
static void add_step(compared_step *step, const char *gpu, const char *gpus, const char *name, const char *figure,
                     double ratio) {
    const char *prefix = strstr(gpu, "machine_"), *machine = prefix ? prefix + strlen("machine_") : gpu;
    *step = (compared_step){.gpus = atoi(gpus), .ratio = ratio};
    snprintf(step->gpu, sizeof step->gpu, "%.*s", (int)strcspn(machine, "."), machine);
    snprintf(step->name, sizeof step->name, "%.99s", name);
    snprintf(step->figure, sizeof step->figure, "%.31s", figure);
}

/* Reads the rows of tests/measured_gpu.txt and simulates them; returns their number. */
static int measured_steps(compared_step *steps) {
    char line[2048], gpu[1024], gpus[1024], name[1024], rate[1024], arguments[1024], title[64], figure[1100];
    int count = 0;
    FILE *file = fopen("tests/measured_gpu.txt", "r");
    if (!file) mt_die("tests/measured_gpu.txt cannot be read");
    while (fgets(line, sizeof line, file)) {
        if (*line == '#' || *line == '\n') continue;
        row_field(gpu, line, 0), row_field(gpus, line, 1), row_field(name, line, 2), row_field(rate, line, 3);
        row_field(arguments, line, 7);
        snprintf(title, sizeof title, strcmp(gpus, "1") ? "train%.20s" : "train", gpus);
        if (!*arguments) bench_arguments(arguments, title, name);
        snprintf(line, sizeof line, "--hidden-dropout 0 --attention-dropout 0 %s", arguments);
        mt_run_options o;
        double predicted = predicted_rate(gpu, atoi(gpus), line, &o);
        mt_options_free(&o);
        MT_CHECK(count < MAX_STEPS);
        snprintf(figure, sizeof figure, "%s tokens/s", rate);
        add_step(&steps[count++], gpu, gpus, name, figure, predicted / atof(rate));
    }
    fclose(file);
    return count;
}

/* Appends arguments, each @NAME replaced by the rest of the line of tests/published_gpu.txt that begins with it. */
static void published_arguments(char arguments[2048], const char *words) {
    char copy[1024], line[2048];
    size_t length = strlen(arguments);
    snprintf(copy, sizeof copy, "%s", words);
    for (char *next = copy, *word; (word = strsep(&next, " \n")) != NULL; length = strlen(arguments)) {
        if (*word != '@') {
            snprintf(arguments + length, 2048 - length, " %s", word);
            continue;
        }
        FILE *file = fopen("tests/published_gpu.txt", "r");
        while (file && fgets(line, sizeof line, file))
            if (strncmp(line, word, strlen(word)) == 0 && line[strlen(word)] == ' ')
                snprintf(arguments + length, 2048 - length, "%.*s", (int)strcspn(line, "\n") - (int)strlen(word),
                         line + strlen(word));
        if (file) fclose(file);
    }
}

/* Operations of a token as Megatron-LM counts them: attention without the mask's half, recomputation included. */
static double published_operations(const mt_options *o) {
    double l = (double)o->num_layers, h = (double)o->hidden_size, s = (double)o->seq_length, passes = 3;
    if (o->recompute_granularity == MT_RECOMPUTE_FULL) passes = 4;
    return passes * l * (24 * h * h + 4 * s * h) + 6 * (double)o->vocab_size * h;
}

/* The same of tests/published_gpu.txt. */
static int published_steps(compared_step *steps) {
    char line[2048], gpu[1024], gpus[1024], name[1024], figure[1024], words[1024];
    int count = 0;
    FILE *file = fopen("tests/published_gpu.txt", "r");
    if (!file) mt_die("tests/published_gpu.txt cannot be read");
    while (fgets(line, sizeof line, file)) {
        if (*line == '#' || *line == '@' || *line == '\n') continue;
        row_field(gpu, line, 0), row_field(gpus, line, 1), row_field(name, line, 2), row_field(figure, line, 3);
        row_field(words, line, 4);
        *line = 0;
        published_arguments(line, words);
        mt_run_options o;
        double rate = predicted_rate(gpu, atoi(gpus), line, &o);
        double published = (double)(o.stack.global_batch_size * o.stack.seq_length) / atof(figure);
        if (strstr(figure, "TFLOP/s")) published = atof(figure) * 1e12 * atof(gpus) / published_operations(&o.stack);
        mt_options_free(&o);
        MT_CHECK(count < MAX_STEPS);
        add_step(&steps[count], gpu, gpus, name, figure, rate / published);
        steps[count++].set = strstr(gpu, "a100") ? 1 : 2;
    }
    fclose(file);
    return count;
}

/* All steps; returns their number. */
static int compared_steps(compared_step steps[2 * MAX_STEPS]) {
    int count = measured_steps(steps);
    return count + published_steps(steps + count);
}

/* The rows of the picture as a table of notes/lab.md. */
static void write_steps(void) {
    static compared_step steps[2 * MAX_STEPS];
    int count = compared_steps(steps);
    printf("| GPUs | Machine | Step | Measured | Predicted |\n|---|---|---|---|---|\n");
    for (int i = 0; i < count; i++)
        printf("| %d | %s | %s | %s | %+.0f%% |\n", steps[i].gpus, steps[i].gpu, steps[i].name, steps[i].figure,
               round(100 * (steps[i].ratio - 1)) + 0.0); // not -0
}

/* Dots at (GPUs, ratio). Steps on equally many GPUs stand beside each other, where they would cover each other. */
static void draw_planner(const char *folder) {
    static compared_step steps[2 * MAX_STEPS];
    static const char *const names[STEP_SETS] = {"measured on H200 and H100", "published, A100", "published, H100"};
    const double radius = 4, apart = 9, places[STEP_SETS] = {76, 350, 570};
    const chart c = {70, 70, 800, 300, 0.6, 9000, -16, 16, true, false};
    int count = compared_steps(steps), most[STEP_SETS][2]; // the slowest and the fastest prediction of a set
    double xs[2 * MAX_STEPS], ys[2 * MAX_STEPS];
    picture p = picture_open(folder, "28-planner", "Predicted and measured training steps", 900, 424);
    for (int set = 0; set < STEP_SETS; set++) {
        int here = 0;
        most[set][0] = most[set][1] = -1;
        for (int i = 0; i < count; i++) {
            if (steps[i].set != set) continue;
            here++;
            if (most[set][0] < 0 || steps[i].ratio < steps[most[set][0]].ratio) most[set][0] = i;
            if (most[set][1] < 0 || steps[i].ratio > steps[most[set][1]].ratio) most[set][1] = i;
        }
        fprintf(p.file, "<circle cx=\"%.0f\" cy=\"24\" r=\"4\" fill=\"%s\"/>\n", places[set], strokes[set]);
        text(&p, places[set] + 12, 28, START, "%s: %d steps", names[set], here);
    }
    for (int percent = -15; percent <= 15; percent += 5) {
        char words[16];
        snprintf(words, sizeof words, "%+d%%", percent);
        chart_mark_y(&p, &c, percent, percent == 0 ? "0%" : words);
    }
    line(&p, c.left, chart_y(&c, 0), c.left + c.width, chart_y(&c, 0), FAINT, 1.2);
    for (int gpus = 1; gpus <= 8192; gpus *= 2) {
        char words[32];
        chart_mark_x(&p, &c, gpus, grouped(gpus, words));
    }
    chart_titles(&p, &c, "speed of the prediction, beside the measured one", "GPUs");
    for (int i = 0; i < count; i++) {
        double x = chart_x(&c, steps[i].gpus), y = chart_y(&c, 100 * (steps[i].ratio - 1));
        for (int place = 0;; place++) { // 0, 1, -1, 2, -2, ... times `apart` beside the middle
            bool is_free = true;
            xs[i] = x + apart * (place % 2 ? place / 2 + 1 : -place / 2), ys[i] = y;
            for (int k = 0; k < i; k++) is_free &= hypot(xs[i] - xs[k], ys[i] - ys[k]) >= apart;
            if (is_free) break;
        }
        fprintf(p.file, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%.0f\" fill=\"%s\"/>\n", xs[i], ys[i], radius,
                strokes[steps[i].set]);
    }
    for (int set = 0; set < STEP_SETS; set++)
        for (int end = 0; end < 2; end++) {
            int i = most[set][end];
            if (strncmp(steps[i].name, "the same", 8) == 0) continue; // says nothing without the row before it
            text(&p, xs[i] + 9, ys[i] + (end ? -6 : 14), START, "%s", steps[i].name);
        }
    picture_close(&p);
}

/* ---- 29: linear attention ---------------------------------------------------------------------------------------- */

enum { PAIRS = 128, MEMORY_HEADS = 64, MEMORY_D = 32, RECALLED = 8 };

typedef struct recall {
    float keys[2 * PAIRS][MEMORY_HEADS][MEMORY_D], values[2 * PAIRS][MEMORY_HEADS][MEMORY_D];
    float out[2 * PAIRS][MEMORY_HEADS][MEMORY_D], beta[2 * PAIRS][MEMORY_HEADS], decay[2 * PAIRS][MEMORY_HEADS];
    float A_log[MEMORY_HEADS], dt_bias[MEMORY_HEADS];
} recall;

/* Writes PAIRS pairs into the memory of the gated delta rule, whose state fades by exp(-forgetting) with each, and then
 * reads them all. */
static void recall_by_delta_rule(recall *r, float forgetting) {
    mt_span span = {0, 2 * PAIRS, 0, 2 * PAIRS, true};
    mt_spans spans = {&span, &span, 1};
    for (int t = 0; t < 2 * PAIRS; t++)
        for (int h = 0; h < MEMORY_HEADS; h++) {
            r->beta[t][h] = t < PAIRS ? 40 : -40;
            r->decay[t][h] = t < PAIRS && forgetting > 0 ? logf(expf(forgetting) - 1) : -40;
        }
    mt_delta_args a = {
        .spans = &spans, .Hk = MEMORY_HEADS, .Hv = MEMORY_HEADS, .Dk = MEMORY_D, .Dv = MEMORY_D, .decays = 1};
    a.q = r->keys, a.k = r->keys, a.v = r->values, a.b = r->beta, a.a = r->decay, a.A_log = r->A_log;
    a.dt_bias = r->dt_bias, a.out = r->out;
    a.q_stride = a.k_stride = a.v_stride = MEMORY_HEADS * MEMORY_D, a.b_stride = a.a_stride = MEMORY_HEADS;
    mt_cpu_ops.delta_rule_forward(&a, MT_F32, NULL);
    for (int t = PAIRS; t < 2 * PAIRS; t++) // the operation divides queries by sqrt(D)
        for (int h = 0; h < MEMORY_HEADS; h++)
            for (int c = 0; c < MEMORY_D; c++) r->out[t][h][c] *= sqrtf(MEMORY_D);
}

/* The same from the sum of k v^T: causal linear attention with queries that see all pairs. */
static void recall_by_sum(recall *r) {
    for (int h = 0; h < MEMORY_HEADS; h++) {
        double S[MEMORY_D][MEMORY_D] = {{0}};
        for (int t = 0; t < 2 * PAIRS; t++) {
            double length = 0, k[MEMORY_D];
            for (int i = 0; i < MEMORY_D; i++) length += pow((double)r->keys[t][h][i], 2);
            for (int i = 0; i < MEMORY_D; i++) k[i] = (double)r->keys[t][h][i] / sqrt(length);
            for (int c = 0; c < MEMORY_D; c++) {
                double read = 0;
                for (int i = 0; i < MEMORY_D; i++) read += S[i][c] * k[i];
                if (t >= PAIRS) r->out[t][h][c] = (float)read;
                for (int i = 0; i < MEMORY_D && t < PAIRS; i++) S[i][c] += k[i] * (double)r->values[t][h][c];
            }
        }
    }
}

/* The error of the value read over the length of the value written, by the number of pairs written since. */
static void draw_recall(picture *p, const chart *c, const recall *r, const char *stroke) {
    double age[PAIRS], error[PAIRS];
    for (int i = 0; i < PAIRS; i++) {
        int first = PAIRS - 1 - i, last = first + RECALLED < PAIRS ? first + RECALLED : PAIRS;
        double difference = 0, length = 0;
        for (int t = first; t < last; t++)
            for (int h = 0; h < MEMORY_HEADS; h++)
                for (int d = 0; d < MEMORY_D; d++) {
                    double v = (double)r->values[t][h][d];
                    difference += pow((double)r->out[PAIRS + t][h][d] - v, 2), length += v * v;
                }
        age[i] = i, error[i] = sqrt(difference / length);
    }
    chart_curve(p, c, age, error, PAIRS, stroke);
}

/* MiB that a text of `tokens` holds in generation, in bf16, if `linear` of the layers keep states. */
static double held_mib(const mt_options *o, double tokens, int64_t linear) {
    double state = (double)(o->linear_num_value_heads * o->linear_key_head_dim * o->linear_value_head_dim);
    double taps = (double)((o->linear_conv_kernel_dim - 1) * (2 * o->linear_num_key_heads * o->linear_key_head_dim +
                                                              o->linear_num_value_heads * o->linear_value_head_dim));
    double row = (double)(o->num_query_groups * 2 * o->kv_channels);
    return ((double)(o->num_layers - linear) * row * 2 * tokens + (double)linear * 4 * (state + taps)) / 0x1p20;
}

static void draw_held(picture *p, const chart *c, const mt_options *o, int64_t linear, const char *stroke) {
    enum { POINTS = 81 };
    double tokens[POINTS], mib[POINTS];
    for (int i = 0; i < POINTS; i++) {
        tokens[i] = c->x_low * pow(c->x_high / c->x_low, (double)i / (POINTS - 1));
        mib[i] = held_mib(o, tokens[i], linear);
    }
    chart_curve(p, c, tokens, mib, POINTS, stroke);
}

static void draw_linear_attention(const char *folder) {
    static const char *const rules[] = {"sum of all pairs", "delta rule", "delta rule, a twentieth fades at each pair"};
    static const char *const lengths[] = {"256", "4,096", "65,536", "1 million"};
    static const char *const layers[] = {"48 layers of attention", "12 of attention, 36 delta nets", "48 delta nets"};
    chart left = {.left = 70, .top = 70, .width = 330, .height = 250, .x_high = PAIRS - 1, .y_high = 2.4};
    chart right = {.left = 530, .top = 70, .width = 330, .height = 250, .x_log = true, .y_log = true};
    right.x_low = 256, right.x_high = 1048576, right.y_low = 10, right.y_high = 1e5;
    picture p = picture_open(folder, "29-memory", "What a state remembers, and the memory of a text", 900, 430);
    recall *r = mt_calloc(sizeof *r);
    mt_cpu_ops.random_normal(r->keys, PAIRS * MEMORY_HEADS * MEMORY_D, 1, 0, 0, 1, MT_F32, NULL);
    mt_cpu_ops.random_normal(r->values, PAIRS * MEMORY_HEADS * MEMORY_D, 2, 0, 0, 1, MT_F32, NULL);
    memcpy(r->keys[PAIRS], r->keys[0], sizeof r->keys / 2);
    text(&p, 20, 30, START, "128 pairs in a state of 32 x 32 numbers");
    for (int i = 0; i <= 120; i += 40) {
        char label[16];
        snprintf(label, sizeof label, "%d", i);
        chart_mark_x(&p, &left, i, label);
    }
    for (int i = 0; i <= 2; i++) {
        char label[16];
        snprintf(label, sizeof label, "%d", i);
        chart_mark_y(&p, &left, i, label);
    }
    chart_titles(&p, &left, "error of the value read / its length", "pairs written since");
    for (int rule = 0; rule < 3; rule++) {
        if (rule == 0)
            recall_by_sum(r);
        else
            recall_by_delta_rule(r, rule == 2 ? 0.05f : 0);
        draw_recall(&p, &left, r, strokes[rule]);
        chart_legend(&p, 70, 376 + 18 * rule, strokes[rule], rules[rule]);
    }
    free(r);
    mt_run_options o;
    open_shape(&o, "data/configs/qwen3-next-80b-a3b.json");
    text(&p, 450, 30, START, "What a text holds in generation, Qwen3-Next-80B");
    for (int i = 0; i < 4; i++) chart_mark_x(&p, &right, 256 << 4 * i, lengths[i]);
    for (int power = 1; power <= 5; power++) {
        static const char *const labels[] = {"10", "100", "1,000", "10,000", "100,000"};
        chart_mark_y(&p, &right, pow(10, power), labels[power - 1]);
    }
    chart_titles(&p, &right, "MiB, bf16, states in fp32", "tokens");
    const int64_t linear[] = {0, o.stack.num_layers * 3 / 4, o.stack.num_layers};
    for (int i = 0; i < 3; i++) {
        draw_held(&p, &right, &o.stack, linear[i], strokes[i]);
        chart_legend(&p, 530, 376 + 18 * i, strokes[i], layers[i]);
    }
    mt_options_free(&o);
    picture_close(&p);
}

/* ---- 30: state spaces -------------------------------------------------------------------------------------------- */

enum { MASK_T = 24, MASK_HEADS = 3, MASK_CHUNKS = 4 };

/* The factors e^(G_t - G_i) of some heads, as the scan computes them: B and C are 1, and channel i of x is 1 at token i
 * alone, so that y[t, i] is the factor times the step of token i. Heads 0 and 1 take steps of 1, head 2 a large one at
 * tokens 9 and 17. */
static void scan_mask(float mask[MASK_T][MASK_HEADS][MASK_T]) {
    static const float rates[MASK_HEADS] = {0.05f, 0.4f, 0.05f};
    static float row[MASK_T][MASK_HEADS * MASK_T + 2], dt[MASK_T][MASK_HEADS];
    float A_log[MASK_HEADS], zeros[MASK_HEADS] = {0};
    mt_span span = {0, MASK_T, 0, MASK_T, true};
    mt_spans spans = {&span, &span, 1};
    for (int h = 0; h < MASK_HEADS; h++) A_log[h] = logf(rates[h]);
    for (int t = 0; t < MASK_T; t++) {
        row[t][MASK_HEADS * MASK_T] = row[t][MASK_HEADS * MASK_T + 1] = 1;
        for (int h = 0; h < MASK_HEADS; h++) {
            row[t][h * MASK_T + t] = 1;
            dt[t][h] = h == 2 && (t == 9 || t == 17) ? 40 : logf(expf(1) - 1);
        }
    }
    mt_ssd_args a = {.spans = &spans, .G = 1, .H = MASK_HEADS, .N = 1, .P = MASK_T, .dt_max = INFINITY};
    a.x = row, a.B = row[0] + MASK_HEADS * MASK_T, a.C = row[0] + MASK_HEADS * MASK_T + 1;
    a.stride = MASK_HEADS * MASK_T + 2, a.dt = dt, a.dt_stride = MASK_HEADS;
    a.A_log = A_log, a.D = a.dt_bias = zeros, a.out = mask;
    mt_cpu_ops.ssd_forward(&a, MT_F32, NULL);
    for (int t = 0; t < MASK_T; t++)
        for (int h = 0; h < MASK_HEADS; h++)
            for (int i = 0; i < MASK_T; i++) mask[t][h][i] /= log1pf(expf(dt[i][h]));
}

/* A cell of blue, darker for larger values in [0, 1]. */
static void shaded(picture *p, double x, double y, double size, double value) {
    char colour[8];
    int rest = (int)lround(253 - 200 * value);
    snprintf(colour, sizeof colour, "#%02x%02x%02x", (unsigned)rest, (unsigned)(rest + (255 - rest) / 3), 0xfbu);
    box(p, x, y, size, size, colour);
}

static void draw_state_spaces(const char *folder) {
    static const char *const heads[] = {"forgets slowly", "forgets fast", "two large steps"};
    static float mask[MASK_T][MASK_HEADS][MASK_T];
    const double cell = 7, left = 20, top = 84, chunk = 56, right = 640;
    picture p = picture_open(folder, "30-masks", "Masks of a scan, and its chunks", 900, 330);
    scan_mask(mask);
    text(&p, left, 30, START, "Factors that a query (row) gives to the tokens before it, of three heads");
    for (int h = 0; h < MASK_HEADS; h++) {
        double x = left + 200 * h;
        text(&p, x, top - 10, START, "%s", heads[h]);
        for (int t = 0; t < MASK_T; t++)
            for (int i = 0; i < MASK_T; i++)
                if (i <= t) shaded(&p, x + cell * i, top + cell * t, cell, (double)mask[t][h][i]);
    }
    text(&p, left, 280, START, "A softmax would decide each row by its own scores; here a token's step decides its");
    text(&p, left, 296, START, "column, and how much all that is older fades.");
    text(&p, right, 30, START, "The same matrix in four chunks");
    for (int row = 0; row < MASK_CHUNKS; row++)
        for (int column = 0; column <= row; column++) {
            double x = right + chunk * column, y = 50 + chunk * row;
            frame(&p, x, y, chunk, chunk, fills[row == column ? BLUE : ORANGE]);
            if (row > column) text(&p, x + chunk / 2, y + chunk / 2 + 4, MIDDLE, "%s", "S");
        }
    box(&p, right, 288, 10, 10, fills[BLUE]);
    text(&p, right + 16, 297, START, "attention within the chunk");
    box(&p, right, 306, 10, 10, fills[ORANGE]);
    text(&p, right + 16, 315, START, "by way of the state");
    picture_close(&p);
}

/* ---- 31: sparse attention ---------------------------------------------------------------------------------------- */

enum { SPARSE_T = 40, SPARSE_HEADS = 4, SPARSE_D = 4, SPARSE_TOPK = 6 };

/* The keys that an indexer of random queries and keys selects, by the operation; token 11 has a key that most queries
 * look for. */
static void draw_sparse_attention(const char *folder) {
    static float q[SPARSE_T][SPARSE_HEADS][SPARSE_D], k[SPARSE_T][SPARSE_D], weights[SPARSE_T][SPARSE_HEADS];
    static int32_t selected[SPARSE_T][SPARSE_TOPK];
    const double cell = 6, left = 20, top = 60, right = 330;
    picture p = picture_open(folder, "31-selected", "Keys that an indexer selects", 560, 330);
    mt_span span = {0, SPARSE_T, 0, SPARSE_T, true};
    mt_spans spans = {&span, &span, 1};
    for (int t = 0; t < SPARSE_T; t++)
        for (int c = 0; c < SPARSE_D; c++) {
            k[t][c] = t == 11 ? 2 : sinf((float)(t * 7 + c * 3));
            for (int h = 0; h < SPARSE_HEADS; h++)
                q[t][h][c] = cosf((float)(t * 5 + h * 11 + c * 2)) + 0.3f, weights[t][h] = 1;
        }
    mt_indexer_args a = {.spans = &spans, .rows = SPARSE_T, .H = SPARSE_HEADS, .D = SPARSE_D, .topk = SPARSE_TOPK};
    a.scale = 1, a.q = q, a.k = k, a.weights = weights, a.selected = selected[0];
    mt_cpu_ops.indexer_forward(&a, MT_F32, NULL);
    text(&p, left, 30, START, "%d tokens; of the keys that a query (row) sees, %d are selected", SPARSE_T, SPARSE_TOPK);
    for (int t = 0; t < SPARSE_T; t++) {
        for (int i = 0; i <= t; i++) shaded(&p, left + cell * i, top + cell * t, cell, 0.05);
        for (int i = 0; i < SPARSE_TOPK; i++)
            if (selected[t][i] >= 0) shaded(&p, left + cell * selected[t][i], top + cell * t, cell, 0.9);
    }
    text(&p, right, 90, START, "The first queries see few keys,");
    text(&p, right, 106, START, "and attend to all of them.");
    text(&p, right, 138, START, "Token 11 has a key that most");
    text(&p, right, 154, START, "queries look for: a column.");
    text(&p, right, 186, START, "Each row is found by content;");
    text(&p, right, 202, START, "no pattern is given.");
    picture_close(&p);
}

/* ---- 32: half precision ------------------------------------------------------------------------------------------ */

enum { OCTAVE_LOW = -40, OCTAVES = 60, SCALED_STEPS = 64 };

/* The share of each octave in the gradients of the golden Llama: those of a batch of 128 tokens. */
static void count_octaves(double share[OCTAVES]) {
    mt_safetensors *set;
    mt_error error;
    int64_t all = 0;
    check(mt_safetensors_open_folder(&set, "tests/golden/hf/llama/grads", "model", &error), &error);
    for (int64_t i = 0; i < mt_safetensors_count(set); i++) {
        const mt_tensor_info *tensor = mt_safetensors_get(set, i);
        for (int64_t at = 0; at + 4 <= tensor->bytes; at += 4) {
            float value;
            memcpy(&value, (const char *)tensor->data + at, sizeof value);
            if (value == 0) continue; // of words that do not occur
            int octave = ilogbf(value) - OCTAVE_LOW;
            all++;
            if (octave >= 0 && octave < OCTAVES) share[octave]++;
        }
    }
    for (int i = 0; i < OCTAVES; i++) share[i] *= 100 / (double)all;
    mt_safetensors_close(set);
}

/* Bars of the octaves, moved up by some. */
static void draw_octaves(picture *p, const chart *c, const double share[OCTAVES], int up, const char *fill) {
    double width = c->width / (c->x_high - c->x_low);
    for (int i = 0; i < OCTAVES; i++) {
        double x = OCTAVE_LOW + i + up, top = chart_y(c, share[i]);
        if (share[i] > 0 && x >= c->x_low && x < c->x_high)
            box(p, chart_x(c, x) + 0.5, top, width - 1, c->top + c->height - top, fill);
    }
}

static void draw_range(picture *p, const chart *c, double low, double high, const char *fill, const char *name) {
    box(p, chart_x(c, low), c->top, chart_x(c, high) - chart_x(c, low), c->height, fill);
    text(p, (chart_x(c, low) + chart_x(c, high)) / 2, c->top + 14, MIDDLE, "%s", name);
}

static void draw_gradients(picture *p, const chart *c) {
    static double share[OCTAVES];
    count_octaves(share);
    draw_range(p, c, c->x_low, -25, "#f3dede", "0");
    draw_range(p, c, -25, -14, "#f7efd2", "fewer bits");
    draw_range(p, c, -14, 16, SHEET, "11 bits");
    draw_range(p, c, 16, c->x_high, "#f3dede", "inf");
    for (int y = 0; y <= 20; y += 10) {
        char label[16];
        snprintf(label, sizeof label, "%d%%", y);
        chart_mark_y(p, c, y, label);
    }
    for (int x = -40; x <= 16; x += 8) {
        char label[16];
        snprintf(label, sizeof label, "%d", x);
        chart_mark_x(p, c, x, label);
    }
    draw_octaves(p, c, share, -15, fills[ORANGE]);
    draw_octaves(p, c, share, 1, fills[BLUE]);
    chart_titles(p, c, "share of the gradients", "log2 of the magnitude");
    box(p, c->left, c->top + c->height + 52, 18, 10, fills[ORANGE]);
    text(p, c->left + 26, c->top + c->height + 61, START, "scale 1");
    box(p, c->left + 110, c->top + c->height + 52, 18, 10, fills[BLUE]);
    text(p, c->left + 136, c->top + c->height + 61, START, "scale 65,536");
}

/* The scale as mt_loss_scaler_update moves it, in a run whose gradients overflow above a limit that changes. */
static void draw_scales(picture *p, const chart *c) {
    mt_options o = mt_options_plain(1, 8, 1, 8, 8);
    o.initial_loss_scale = 1 << 20, o.loss_scale_window = 8;
    mt_loss_scaler scaler = {o.initial_loss_scale, 0, o.hysteresis};
    for (int y = 8; y <= 20; y += 4) {
        char label[16];
        snprintf(label, sizeof label, "%d", y);
        chart_mark_y(p, c, y, label);
    }
    for (int x = 0; x <= SCALED_STEPS; x += 16) {
        char label[16];
        snprintf(label, sizeof label, "%d", x);
        chart_mark_x(p, c, x, label);
    }
    for (int step = 0; step < SCALED_STEPS; step++) {
        int limit = step < 24 ? 15 : step < 44 ? 12 : 14; // the largest power of two without an overflow
        int power = ilogb(scaler.scale);
        bool overflows = power > limit;
        double x = chart_x(c, step), width = c->width / SCALED_STEPS;
        line(p, x, chart_y(c, limit + 0.5), x + width, chart_y(c, limit + 0.5), FAINT, 1.5);
        box(p, x, chart_y(c, power) - 3, width, 6, overflows ? strokes[1] : strokes[0]);
        mt_loss_scaler_update(&scaler, &o, overflows);
    }
    chart_titles(p, c, "log2 of the scale", "step");
    double y = c->top + c->height + 61;
    chart_legend(p, c->left, y, strokes[0], "update");
    chart_legend(p, c->left + 96, y, strokes[1], "skipped");
    chart_legend(p, c->left + 200, y, FAINT, "overflow above");
}

/* A picture's patches and tokens, and the coordinates that a server's batcher gives to a text with it. */
static void draw_vision(const char *folder) {
    enum { BEFORE = 4, BEHIND = 4, MOST = 64 };
    static const char *const rows[] = {"frame", "row", "column"};
    const mt_image_config config = {
        .patch_size = 14, .temporal_patch_size = 2, .merge_size = 2, .min_pixels = 3136, .max_pixels = 1 << 20};
    const double cell = 22, left = 20, top = 60, right = 300, step = 24;
    mt_image_grid grid;
    mt_error error;
    int32_t tokens[MOST] = {0};
    check(mt_image_grid_of(&grid, &config, 90, 145, "picture", &error), &error);
    int64_t height = grid.height / 2, width = grid.width / 2, count = BEFORE + height * width + BEHIND;
    mt_batcher_plan plan = {.max_sequences = 1, .max_length = count + 1, .max_tokens = count, .page_rows = count + 1};
    plan.num_pages = 1, plan.max_image_tokens = height * width, plan.merge_size = 2;
    mt_sequence_image image = {.first = BEFORE, .grid = grid};
    mt_sequence_images images = {.count = 1, .items = &image};
    mt_sequence sequence = {
        .tokens = tokens, .num_prompt = count, .num_tokens = count, .max_tokens = count + 1, .slot = -1};
    sequence.images = &images;
    mt_batcher *batcher = mt_batcher_create(&plan);
    MT_CHECK(count < MOST && mt_batcher_next(batcher, &sequence, 1) == count);
    const int32_t *at = batcher->batch.image_rows.coordinates;
    picture p = picture_open(folder, "33-vision", "A picture as tokens, and their coordinates", 920, 250);
    text(&p, left, 30, START, "90 x 145 pixels: %lld x %lld patches", (long long)grid.height, (long long)grid.width);
    text(&p, left, 46, START, "of 14 pixels, four of them a token");
    for (int64_t row = 0; row < grid.height; row++)
        for (int64_t column = 0; column < grid.width; column++)
            frame(&p, left + cell * (double)column, top + cell * (double)row, cell, cell,
                  fills[(row / 2 + column / 2) % 2 == 0 ? BLUE : GREEN]);
    for (int64_t k = 0; k < height * width; k++) {
        double x = left + cell * (double)(2 * (k % width)), y = top + cell * (double)(2 * (k / width));
        text(&p, x + cell / 2, y + cell / 2 + 4, MIDDLE, "%lld", (long long)k);
    }
    text(&p, right, 30, START, "Coordinates of %d tokens of text, the picture, and %d of text", BEFORE, BEHIND);
    for (int64_t t = 0; t < count; t++) {
        bool is_image = t >= BEFORE && t < BEFORE + height * width;
        double x = right + 50 + step * (double)t;
        if (is_image) text(&p, x + step / 2, 74, MIDDLE, "%lld", (long long)(t - BEFORE));
        for (int which = 0; which < 3; which++) {
            double y = 84 + 34 * which;
            box(&p, x, y, step - 2, 26, fills[is_image ? (which == 0 ? YELLOW : ORANGE) : PURPLE]);
            text(&p, x + step / 2 - 1, y + 17, MIDDLE, "%d", (int)at[3 * t + which]);
        }
    }
    for (int which = 0; which < 3; which++) text(&p, right, 101 + 34 * which, START, "%s", rows[which]);
    text(&p, right, 215, START, "The picture begins at the next position of the text, and the text goes on behind its");
    text(&p, right, 231, START, "longer side.");
    mt_batcher_destroy(batcher);
    picture_close(&p);
}

static void draw_half_precision(const char *folder) {
    const chart left = {.left = 64, .top = 70, .width = 410, .height = 230, .x_low = -40, .x_high = 20, .y_high = 24};
    const chart right = {
        .left = 540, .top = 70, .width = 330, .height = 230, .x_high = SCALED_STEPS, .y_low = 8, .y_high = 21};
    picture p =
        picture_open(folder, "32-gradients", "Gradients in the range of fp16, and the scale of the loss", 900, 382);
    text(&p, 20, 30, START, "128 tokens' gradients in a batch of 4 million tokens");
    text(&p, 500, 30, START, "The scale, doubled after 8 good steps");
    draw_gradients(&p, &left);
    draw_scales(&p, &right);
    picture_close(&p);
}

/* ---- 33: serving ------------------------------------------------------------------------------------------------- */

enum { CALLS = 5, CALL_SLOTS = 4, CALL_LENGTH = 64, CALL_ROWS = 8, CALL_LEAST = 8 };

/* Requests to a server. Times are in tokens; a step takes as many as it has, at least CALL_LEAST. */
static const struct {
    double arrives, leaves; // its client closes the connection; 0: it waits for the end
    int64_t prompt, new_tokens;
} calls[CALLS] = {{0, 0, 6, 14}, {0, 0, 6, 11}, {25, 0, 40, 5}, {34, 130, 6, 12}, {52, 0, 6, 4}};

/* Draws the steps of a server whose steps have at most max_tokens tokens. Returns the longest pause of a stream. */
static double draw_calls(picture *p, double x, double y, double scale, int64_t max_tokens) {
    const mt_batcher_plan plan = {.max_sequences = CALL_SLOTS,
                                  .max_length = CALL_LENGTH,
                                  .max_tokens = max_tokens,
                                  .page_rows = CALL_ROWS,
                                  .num_pages = CALL_SLOTS * CALL_LENGTH / CALL_ROWS};
    static int32_t tokens[CALLS][CALL_LENGTH];
    mt_batcher *b = mt_batcher_create(&plan);
    mt_sequence sequences[CALLS];
    double now = 0, longest = 0, last[CALLS] = {0};
    int64_t arrived = 0;
    for (;;) {
        for (; arrived < CALLS && calls[arrived].arrives <= now; arrived++) {
            mt_sequence *s = &sequences[arrived];
            *s = (mt_sequence){.id = arrived, .tokens = tokens[arrived], .slot = -1};
            s->num_prompt = s->num_tokens = calls[arrived].prompt;
            s->max_tokens = s->num_prompt + calls[arrived].new_tokens;
            for (int64_t t = 0; t < s->num_prompt; t++) s->tokens[t] = (int32_t)(100 * arrived + t);
        }
        for (int64_t i = 0; i < arrived; i++)
            if (calls[i].leaves > 0 && calls[i].leaves <= now) sequences[i].finish = MT_FINISH_STOP;
        if (mt_batcher_next(b, sequences, arrived) == 0) break;
        double takes = (double)mt_max(b->batch.num_tokens, CALL_LEAST);
        for (int64_t i = 0; i < arrived; i++) {
            int64_t rows = 0;
            for (int64_t s = 0; s < b->batch.num_spans; s++)
                if (sequences[i].slot == b->batch.spans[s].k_start / CALL_LENGTH) rows = b->batch.spans[s].q_len;
            bool reads = sequences[i].num_tokens == sequences[i].num_prompt;
            double from = x + scale * now, width = scale * takes - 1;
            if (rows > 0) frame(p, from, y + 22 * (double)i, width, 18, fills[reads ? ORANGE : BLUE]);
            if (rows > 1) text(p, from + width / 2, y + 22 * (double)i + 13, MIDDLE, "%lld", (long long)rows);
            if (rows == 0 && sequences[i].finish == MT_UNFINISHED)
                box(p, from, y + 22 * (double)i, width, 18, "#e4e6e0");
        }
        now += takes;
        for (int64_t l = 0; l < b->num_logits; l++) {
            int64_t i = b->logit_sequences[l];
            mt_sequence *s = &sequences[i];
            if (last[i] > 0) longest = mt_maximum(longest, now - last[i]);
            last[i] = now, s->tokens[s->num_tokens++] = 1;
            if (s->num_tokens == s->max_tokens) s->finish = MT_FINISH_LENGTH;
        }
    }
    for (int64_t i = 0; i < CALLS; i++)
        text(p, x - 8, y + 22 * (double)i + 13, END, "request %lld, %lld + %lld", (long long)i,
             (long long)calls[i].prompt, (long long)calls[i].new_tokens);
    mt_batcher_destroy(b);
    return longest;
}

static void draw_serving(const char *folder) {
    picture p = picture_open(folder, "serving", "The steps of a server, with whole prompts and with parts", 900, 390);
    const double x = 160, scale = 3.25; // a binary fraction: the same picture with and without fused multiply-add
    double whole = draw_calls(&p, x, 60, scale, CALL_LENGTH), parts = draw_calls(&p, x, 240, scale, 12);
    text(&p, 20, 36, START, "Whole prompts: the longest pause of a stream is %.0f tokens", whole);
    text(&p, 20, 216, START, "At most 12 tokens a step: %.0f tokens", parts);
    box(&p, x, 364, 10, 10, fills[ORANGE]);
    text(&p, x + 16, 373, START, "reads its prompt (tokens)");
    box(&p, x + 220, 364, 10, 10, fills[BLUE]);
    text(&p, x + 236, 373, START, "writes a token");
    box(&p, x + 380, 364, 10, 10, "#e4e6e0");
    text(&p, x + 396, 373, START, "waits; request 3 is cancelled");
    picture_close(&p);
}

/* A row of notes/serving-load.txt, which tests/record_serve.sh writes: means at a load, a share of the server's rate.
 */
enum { MAX_LOADS = 16, LOAD_COLUMNS = 10 };
typedef struct loads {
    double rows[MAX_LOADS][LOAD_COLUMNS];
    int count;
} loads;
enum { LOAD, OFFERED, ANSWERED, REFUSED, BATCH, QUEUE, PAGES, WAIT_MS, FIRST_MS, REQUEST_MS };

static loads read_loads(void) {
    static const char path[] = "notes/serving-load.txt";
    FILE *file = fopen(path, "r");
    loads l = {.count = 0};
    char row[512];
    if (!file) mt_die("%s: cannot be read; run tests/record_serve.sh", path);
    while (fgets(row, sizeof row, file)) {
        char *at = row;
        if (*row == '#') continue;
        MT_CHECK(l.count < MAX_LOADS);
        for (int i = 0; i < LOAD_COLUMNS; i++) l.rows[l.count][i] = strtod(at, &at);
        l.count++;
    }
    fclose(file);
    if (l.count < 2) mt_die("%s: has %d rows; run tests/record_serve.sh", path, l.count);
    return l;
}

/* A plot of columns over the load, from 0 to `most`, with the names of the columns above it. */
static void plot_loads(picture *p, const loads *l, double x, const char *title, double most, const char *unit,
                       const int *columns, const char *const *names, int count) {
    static const char *const strokes[] = {"#2f6fab", "#c55a11", "#548235"};
    const double top = 92, width = 226, height = 160, last = l->rows[l->count - 1][LOAD];
    text(p, x, 28, START, "%s", title);
    for (int i = 0; i <= 4; i++) {
        double y = top + height - height * i / 4;
        line(p, x, y, x + width, y, i ? "#e4e6e0" : INK, 1);
        text(p, x - 6, y + 4, END, "%.4g%s", most * i / 4, unit);
    }
    for (int r = 0; r < l->count; r++)
        if (r % 2 == 0 || r + 1 == l->count)
            text(p, x + width * l->rows[r][LOAD] / last, top + height + 16, MIDDLE, "%.3g", l->rows[r][LOAD]);
    for (int c = 0; c < count; c++) {
        double before_x = 0, before_y = 0;
        box(p, x, 38 + 16 * c, 10, 10, strokes[c]);
        text(p, x + 16, 47 + 16 * c, START, "%s", names[c]);
        for (int r = 0; r < l->count; r++) {
            double at = x + width * l->rows[r][LOAD] / last;
            double y = top + height - height * mt_minimum(l->rows[r][columns[c]] / most, 1);
            if (r > 0) line(p, before_x, before_y, at, y, strokes[c], 2);
            before_x = at, before_y = y;
        }
    }
}

/* The least of 1, 2, 4, 5 and 8 times a power of 10 that is not less. */
static double round_up(double value) {
    static const double steps[] = {1, 2, 4, 5, 8, 10};
    double power = pow(10, floor(log10(value)));
    int i = 0;
    while (steps[i] * power < value * 0.999999) i++;
    return steps[i] * power;
}

static void draw_serving_load(const char *folder) {
    picture p =
        picture_open(folder, "serving-load", "Batch, queue, latencies and pages of a server by its load", 900, 300);
    const loads l = read_loads();
    double most = 0, longest = 0;
    for (int r = 0; r < l.count; r++) {
        most = mt_maximum(most, mt_maximum(l.rows[r][BATCH], l.rows[r][QUEUE]));
        longest = mt_maximum(longest, l.rows[r][REQUEST_MS]);
    }
    plot_loads(&p, &l, 50, "Requests", round_up(most), "", (int[]){BATCH, QUEUE},
               (const char *[]){"in the batch (8 at most)", "in the queue (32 at most)"}, 2);
    plot_loads(&p, &l, 358, "Milliseconds", round_up(longest), "", (int[]){WAIT_MS, FIRST_MS, REQUEST_MS},
               (const char *[]){"in the queue", "until the first token", "until the end"}, 3);
    plot_loads(&p, &l, 656, "Shares", 1, "", (int[]){PAGES, REFUSED},
               (const char *[]){"of pages in use", "of requests refused (429)"}, 2);
    text(&p, 450, 290, MIDDLE, "load: requests offered, as a share of the rate of 16 clients in a loop");
    picture_close(&p);
}

/* ---- schedules as JSON, for notes/book/explorer.js --------------------------------------------------------------- */

enum { EXPLORED_STAGES = 8, EXPLORED_MICRO_BATCHES = 16, EXPLORED_CHUNKS = 4, ALL_FORWARDS = -1 };

/* Writes the computations of a rank in their order, such as "F0 F1 6<1 B0": a forward (F), a backward (B) or its parts
 * (I: of the input, W: of the weights) of a micro-batch, a letter for the chunk if there are several, and "6<1" where
 * the rank waits for 6 units of time, for a message of rank 1. The wait after the last computation is left out. A list
 * without messages waits for its neighbours. */
static void write_rank(FILE *file, const mt_timeline *t, int64_t rank, bool has_messages) {
    double now = 0;
    int64_t peer = -1;
    const char *space = "";
    fprintf(file, "\"");
    for (int64_t i = t->first[rank]; i < t->first[rank + 1]; i++) {
        const mt_action *action = &t->actions[i];
        if (action->peer >= 0) {
            if (t->end[i] > t->start[i]) peer = action->peer; // sends take no time: a receive that waits
            continue;
        }
        if (!has_messages) peer = action->kind == MT_ACTION_FORWARD ? rank - 1 : rank + 1;
        int64_t waits = llround(t->start[i] - now);
        MT_CHECK(waits == 0 || peer >= 0);
        if (waits > 0) fprintf(file, "%s%lld<%lld", space, (long long)waits, (long long)peer), space = " ";
        fprintf(file, "%s%c%lld", space, "FBIW"[action->kind], (long long)action -> micro_batch);
        if (t->schedule.vp > 1) fputc((int)('a' + action->chunk), file);
        space = " ", now = t->end[i];
    }
    fprintf(file, "\"");
}

/* Writes a simulated schedule. A chunk's forward takes one unit of time, its backward two, each part of it one. */
static void write_timeline(FILE *file, const mt_timeline *t, bool has_messages) {
    fprintf(file, "{\"span\":%lld,\"bubble\":%.6f,\"peak\":[", llround(t->span), t->bubble);
    for (int64_t r = 0; r < t->schedule.pp; r++) fprintf(file, "%s%lld", r > 0 ? "," : "", (long long)t->live[r]);
    fprintf(file, "],\"ranks\":[");
    for (int64_t r = 0; r < t->schedule.pp; r++) {
        if (r > 0) fputc(',', file);
        write_rank(file, t, r, has_messages);
    }
    fprintf(file, "]}");
}

/* Writes the schedule of options of `train`, or the error with which `train` refuses them. */
static void write_explored(FILE *file, int kind, int64_t pp, int64_t vp, int64_t micro_batches) {
    const mt_action_costs costs = {1, 1, 1, 0};
    char words[512], *argv[64];
    int argc = 0;
    mt_run_options o;
    mt_error error;
    mt_timeline t;
    if (kind == ALL_FORWARDS) {
        t = timeline_of_all_forwards(pp, micro_batches);
        write_timeline(file, &t, false);
        mt_timeline_free(&t);
        return;
    }
    snprintf(words, sizeof words,
             "train --mock-data --num-layers %lld --hidden-size 64 --num-attention-heads 4 --vocab-size 256 --lr 1 "
             "--train-iters 1 --seq-length 8 --micro-batch-size 1 --global-batch-size %lld "
             "--pipeline-model-parallel-size %lld --num-virtual-stages-per-pipeline-rank %lld --pipeline-schedule %s",
             (long long)(pp * vp), (long long)micro_batches, (long long)pp, (long long)vp,
             kind == MT_SCHEDULE_1F1B          ? "1f1b"
             : kind == MT_SCHEDULE_INTERLEAVED ? "interleaved"
                                               : "zb-h1");
    for (char *word = strtok(words, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    check(mt_options_parse(&o, MT_PROGRAM_TRAIN, argc, argv, &error), &error);
    if (mt_options_finish(&o, MT_PROGRAM_TRAIN, pp, &error) == 0) {
        mt_schedule schedule = mt_schedule_of(&o.stack, micro_batches);
        MT_CHECK(mt_timeline_create(&t, &schedule, &costs, 0) == 0);
        write_timeline(file, &t, true);
        mt_timeline_free(&t);
    } else {
        fprintf(file, "{\"error\":\"");
        for (const char *c = error.text; *c; c++) fprintf(file, *c == '"' || *c == '\\' ? "\\%c" : "%c", *c);
        fprintf(file, "\"}");
    }
    mt_options_free(&o);
}

/* All schedules that the sliders of notes/book/explorer.js select, by "SCHEDULE/STAGES/CHUNKS/MICRO-BATCHES". */
static void write_schedules(const char *path) {
    static const struct {
        const char *name;
        int kind, first_vp, last_vp;
    } kinds[] = {{"1f1b", MT_SCHEDULE_1F1B, 1, 1},
                 {"interleaved", MT_SCHEDULE_INTERLEAVED, 2, EXPLORED_CHUNKS},
                 {"zb-h1", MT_SCHEDULE_ZB_H1, 1, 1},
                 {"gpipe", ALL_FORWARDS, 1, 1}};
    mt_new_file out;
    mt_error error;
    check(mt_new_file_open(&out, path, "file", &error), &error);
    fprintf(out.stream, "{\"stages\":%d,\"micro_batches\":%d,\"chunks\":%d,\"schedules\":{", EXPLORED_STAGES,
            EXPLORED_MICRO_BATCHES, EXPLORED_CHUNKS);
    const char *comma = "";
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int pp = 1; pp <= EXPLORED_STAGES; pp++)
            for (int vp = kinds[k].first_vp; vp <= kinds[k].last_vp; vp++)
                for (int m = 1; m <= EXPLORED_MICRO_BATCHES; m++) {
                    fprintf(out.stream, "%s\n\"%s/%d/%d/%d\":", comma, kinds[k].name, pp, vp, m), comma = ",";
                    write_explored(out.stream, kinds[k].kind, pp, vp, m);
                }
    fprintf(out.stream, "\n}}\n");
    check(mt_new_file_close(&out, 0, &error), &error);
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "--schedules") == 0) {
        write_schedules(argv[2]);
        return 0;
    }
    if (argc == 2 && strcmp(argv[1], "--steps") == 0) {
        write_steps();
        return 0;
    }
    if (argc != 2)
        mt_die("usage: draw FOLDER, draw --schedules FILE.json or draw --steps (in the root of the project)");
    draw_mini(argv[1]);
    draw_masks(argv[1]);
    draw_bucket(argv[1]);
    draw_layer(argv[1]);
    draw_index(argv[1]);
    draw_samples(argv[1]);
    draw_schedule(argv[1]);
    draw_rates(argv[1]);
    draw_step(argv[1]);
    draw_pipelines(argv[1]);
    draw_bubbles(argv[1]);
    draw_memory(argv[1]);
    draw_sharing(argv[1]);
    draw_context(argv[1]);
    draw_grid(argv[1]);
    draw_tensor(argv[1]);
    draw_cut(argv[1]);
    draw_latent(argv[1]);
    draw_checkpoint(argv[1]);
    draw_routers(argv[1]);
    draw_folding(argv[1]);
    draw_journey(argv[1]);
    draw_recomputation(argv[1]);
    draw_offloading(argv[1]);
    draw_fp8(argv[1]);
    draw_ratios(argv[1]);
    draw_preferences(argv[1]);
    draw_collectives(argv[1]);
    draw_five(argv[1]);
    draw_attention(argv[1]);
    draw_kernel(argv[1]);
    draw_gpu(argv[1]);
    draw_generation(argv[1]);
    draw_packing(argv[1]);
    draw_adapters(argv[1]);
    draw_divergence(argv[1]);
    draw_planner(argv[1]);
    draw_linear_attention(argv[1]);
    draw_state_spaces(argv[1]);
    draw_sparse_attention(argv[1]);
    draw_half_precision(argv[1]);
    draw_vision(argv[1]);
    draw_serving(argv[1]);
    draw_serving_load(argv[1]);
    return 0;
}
